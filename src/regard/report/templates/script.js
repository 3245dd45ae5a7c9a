"use strict";
(() => {
  const all = (what, where = document) => [...where.querySelectorAll(what)];
  const one = (what, where = document) => where.querySelector(what);
  const make = (name, text = "", of = {}) => {
    const made = Object.assign(document.createElement(name), of);
    made.textContent = text;
    return made;
  };
  const drawn = (name, of) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(of)) made.setAttribute(key, value);
    return made;
  };
  const maps = JSON.parse(one("#data").textContent).maps;
  document.documentElement.classList.add("scripted");

  // The contents are open beside the page, and closed above it.
  const wide = matchMedia("(min-width: 70.01rem)");
  const beside = () => { one("#contents").open = wide.matches; };
  wide.addEventListener("change", beside);
  beside();

  // Choosing an explanation in one place chooses it everywhere.
  const tabs = all(".tab");
  for (const tab of tabs) tab.addEventListener("change", () => {
    for (const other of tabs) if (other.dataset.method === tab.dataset.method) other.checked = true;
  });

  // Tables are sorted by a click on a heading.
  for (const table of all("table:not(.heads):not(.matrix)")) {
    const heads = all("thead th", table), body = table.tBodies[0];
    heads.forEach((head, column) => {
      const button = make("button", head.textContent, { type: "button" });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const text = (row) => row.cells[column].textContent.trim();
        const order = (a, b) => {
          const x = parseFloat(text(a)), y = parseFloat(text(b));
          if (!isNaN(x) && !isNaN(y)) return x - y;
          return isNaN(x) && isNaN(y) ? text(a).localeCompare(text(b), "en") : isNaN(x) ? 1 : -1;
        };
        body.append(...[...body.rows].sort((a, b) => (down ? -order(a, b) : order(a, b))));
      });
    });
  }
  for (const box of all(".scroll")) if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;

  // One example and one explanation at a time, or all explanations.
  const examples = all(".example"), which = one("#pick-example"), method = one("#pick-method");
  const show = () => {
    examples.forEach((example, at) => { example.hidden = String(at) !== which.value; });
    for (const line of all(".example .line")) line.hidden = method.value !== "" && line.dataset.method !== method.value;
  };
  if (which) {
    which.addEventListener("change", show);
    method.addEventListener("change", show);
    show();
  }

  // Search: parts and rows without the words are hidden.
  const search = one("#search"), parts = all(".part"), rows = all("main tbody tr").filter((row) => !row.closest(".heads"));
  const find = () => {
    const wanted = search.value.trim().toLowerCase();
    const has = (part) => part.textContent.toLowerCase().includes(wanted);
    let count = 0;
    for (const part of parts) {
      part.classList.toggle("unfound", wanted !== "" && !has(part));
      count += wanted !== "" && has(part) ? 1 : 0;
    }
    for (const row of rows) {
      const some = wanted !== "" && [...row.parentElement.rows].some(has);
      row.hidden = some && !has(row);
      if (some && row.closest("details")) row.closest("details").open = true;
    }
    if (which) {
      if (wanted === "") show();
      else examples.forEach((example) => { example.hidden = false; });
    }
    one("#matches").textContent = wanted === "" ? "" : `${count} parts have it`;
  };
  search.addEventListener("input", find);

  // Nothing that is collapsed is lost in print.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = all("details:not([open])");
    for (const part of opened) part.open = true;
    for (const part of all(".example, .line")) part.hidden = false;
  });
  addEventListener("afterprint", () => {
    for (const part of opened) part.open = false;
    if (which) show();
  });

  // Packed attention: see packing.py.
  const unpacked = (name) => {
    const bytes = Uint8Array.from(atob(maps[name]), (sign) => sign.charCodeAt(0));
    const [heads, queries, keys] = [0, 2, 4].map((at) => bytes[at] + 256 * bytes[at + 1]);
    const size = keys <= 256 ? 1 : 2, starts = [];
    for (let at = 6; starts.length < heads * queries; at += 1 + bytes[at] * (size + 1)) starts.push(at);
    const row = (head, query) => {
      const start = starts[head * queries + query], weights = new Map();
      for (let at = start + 1; at < start + 1 + bytes[start] * (size + 1); at += size + 1)
        weights.set(size === 1 ? bytes[at] : bytes[at] + 256 * bytes[at + 1], bytes[at + size] / 255);
      return weights;
    };
    return { queries, keys, row };
  };

  const explore = (panel) => {
    const [looking, seen] = all(".tokens", panel).map((list) => all("span", list).map((token) => token.textContent));
    const place = one(".map", panel), buttons = all("[data-head]", panel);
    let packed = null;
    const choose = (button) => {
      packed = packed || unpacked(panel.dataset.maps);
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      place.hidden = false;
      chart(place, packed, Number(button.dataset.head), button.dataset.said, looking, seen);
    };
    for (const button of buttons) button.addEventListener("click", () => choose(button));
    panel.addEventListener("toggle", () => {
      if (!panel.open || !place.hidden) return;
      const most = buttons.reduce((best, other) => effect(other) > effect(best) ? other : best, buttons[0]);
      if (most) choose(most);
    });
  };
  const effect = (button) => parseFloat(one("small", button).textContent) || 0;

  const chart = (place, packed, head, title, looking, seen) => {
    const { queries, keys } = packed, table = [];
    for (let query = 0; query < queries; query += 1) table.push(packed.row(head, query));
    const largest = Math.max(0, ...table.map((row) => Math.max(0, ...row.values())));
    const step = Math.max(6, Math.min(20, Math.floor(900 / Math.max(queries, keys)))), left = 92, top = 92;
    const said = make("output", "", {}), seenLine = make("p", "", { className: "seen shaded", dir: "auto" });
    const svg = drawn("svg", { role: "img", width: left + keys * step + 2, height: top + queries * step + 2, class: "tokens-map",
      "aria-label": `${title}: ${queries} tokens that look, down, and ${keys} that are looked at, across` });
    svg.append(drawn("rect", { x: left, y: top, width: keys * step, height: queries * step, class: "back" }));
    table.forEach((row, query) => row.forEach((weight, key) => svg.append(drawn("rect", { class: "cell",
      x: left + key * step, y: top + query * step, width: step, height: step, "fill-opacity": (weight / largest).toFixed(3) }))));
    const short = (word) => (word.length > 13 ? `${word.slice(0, 12)}…` : word);
    const label = (word, of) => { const text = drawn("text", of); text.textContent = short(word); svg.append(text); };
    const every = step < 11 ? Math.ceil(11 / step) : 1;
    looking.forEach((word, at) => at % every || label(word, { x: left - 4, y: top + at * step + step / 2 + 4, "text-anchor": "end" }));
    seen.forEach((word, at) => at % every || label(word, { transform: `translate(${left + at * step + step / 2 + 4},${top - 4}) rotate(-90)` }));
    const mark = drawn("rect", { class: "mark", x: left, width: keys * step, height: step, y: top, visibility: "hidden" });
    svg.append(mark);
    const words = seen.map((word) => make("span", word));
    words.forEach((word) => seenLine.append(word, " "));
    const lookers = looking.map((word, query) => make("button", word, { type: "button", className: "look" }));
    const look = (query, key = -1) => {
      const row = table[query];
      mark.setAttribute("y", top + query * step);
      mark.setAttribute("visibility", "visible");
      lookers.forEach((button, at) => button.setAttribute("aria-pressed", String(at === query)));
      words.forEach((word, at) => {
        const share = largest ? Math.round((10 * (row.get(at) || 0)) / Math.max(...row.values(), 1e-9)) : 0;
        word.className = `w p${share}`;
        word.title = row.has(at) ? row.get(at).toFixed(3) : "not kept";
      });
      const most = [...row].sort((a, b) => b[1] - a[1]).slice(0, 3).map(([at, weight]) => `${seen[at]} ${weight.toFixed(3)}`);
      said.textContent = key < 0 ? `${looking[query]} looks at ${most.join(", ") || "nothing much"}`
        : `${looking[query]} → ${seen[key]}: ${row.has(key) ? row.get(key).toFixed(3) : "too small to be kept"}`;
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.width.baseVal.value / box.width;
      const key = Math.floor(((event.clientX - box.left) * scale - left) / step);
      const query = Math.floor(((event.clientY - box.top) * scale - top) / step);
      if (query >= 0 && query < queries && key < keys) look(query, key);
    });
    lookers.forEach((button, query) => {
      for (const kind of ["pointerenter", "focus", "click"]) button.addEventListener(kind, () => look(query));
    });
    const who = make("p", "Hover or choose a token that looks: ", { className: "lookers", dir: "auto" });
    lookers.forEach((button) => who.append(button, " "));
    const box = make("div", "", { className: "scroll" });
    box.append(svg);
    place.replaceChildren(make("h4", `${title}; the strongest is ${largest.toFixed(3)}`), who, said, seenLine, box);
    look(0);
  };
  for (const panel of all(".panel")) if (panel.dataset.maps in maps) explore(panel);
})();
