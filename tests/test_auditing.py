"""The audit: the same findings however it is cut, stopped and put together again."""

import json
import multiprocessing
import os
import pickle
import random
import signal

import numpy as np
import pandas as pd
import pytest
import torch

import regard
from regard import auditing
from regard.asked import QUICK
from regard.audited import cited, differences, load_audit, refusals, title_of
from regard.auditing import Bench, prepared
from regard.cases import Case
from regard.errors import InputError, NotServed, OptionError, StoreError, SubjectError
from regard.foreseeing import foresee
from regard.jobs.plan import Unit
from regard.jobs.running import Runner, run
from regard.models import toys

TEXTS = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad", "good and bad so so"] * 5
ASKED = {"methods": ["raw", "random"], "trials": ["comprehensiveness", ("permutation", {"n": 5})], "shown": 2,
         "batch_size": 8, "threads": 1}  # fmt: skip


@pytest.fixture(scope="module")
def subject():
    return regard.pooled(toys.decisive())


@pytest.fixture(scope="module")
def undisturbed(subject, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    regard.audit(subject, TEXTS, out=folder, **ASKED)
    return folder


def found_in(folder):
    return (folder / "findings.json").read_bytes()


def test_findings_are_those_of_single_trials(subject, undisturbed):
    audit = load_audit(undisturbed)
    assert [(title, one.trial) for title, one in audit.findings] == [
        ("raw", "comprehensiveness"), ("random", "comprehensiveness"), (None, "permutation"),
    ]  # fmt: skip
    alone = regard.trial(subject, TEXTS, "comprehensiveness", method="raw", batch_size=8, examples=500)
    first = audit.findings[0][1]
    assert first.interval == alone.interval
    assert first.values["method"].tolist() == alone.values["method"].tolist()
    assert first.values["method"].nunique() > 3  # else equality would say nothing
    assert first.sentence == alone.sentence


@pytest.mark.parametrize("workers", [1, 2])
def test_order_and_processes_do_not_matter(subject, undisturbed, tmp_path, monkeypatch, workers):
    def shuffled(work, chunks, **where):
        single = [[unit] for chunk in chunks for unit in chunk]
        random.Random(3).shuffle(single)
        assert [unit.id for (unit,) in single] != [unit.id for chunk in chunks for unit in chunk]
        return run(work, single, **where)

    monkeypatch.setattr(auditing, "run", shuffled)
    regard.audit(subject, TEXTS, out=tmp_path / "run", workers=workers, **ASKED)
    assert found_in(tmp_path / "run") == found_in(undisturbed)
    audit = load_audit(tmp_path / "run")
    statistics = {one.statistic for _, one in audit.findings}
    assert len(statistics) == 3  # the findings are not all equal


def test_stopped_by_hand_it_goes_on(subject, undisturbed, tmp_path, monkeypatch):
    ran = []

    def stops(work, chunks, **where):
        for unit, result in run(work, chunks, **where):
            if len(ran) == 4:
                raise KeyboardInterrupt
            ran.append(unit.id)
            yield unit, result

    monkeypatch.setattr(auditing, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        regard.audit(subject, TEXTS, out=tmp_path, **ASKED)
    monkeypatch.setattr(auditing, "run", run)
    assert not (tmp_path / "done.json").exists()
    again = []
    monkeypatch.setattr(Bench, "__call__", _counting(Bench.__call__, again))
    regard.audit(subject, TEXTS, out=tmp_path, resume=True, **ASKED)
    assert not {*ran} & {*again}  # nothing is done twice
    assert found_in(tmp_path) == found_in(undisturbed)


def _counting(call, seen):
    def counted(self, unit):
        seen.append(unit.id)
        return call(self, unit)

    return counted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_random_moments_it_goes_on(subject, undisturbed, tmp_path):
    lots = random.Random(0)
    for attempt in range(40):
        child = os.fork()
        if child == 0:
            signal.setitimer(signal.ITIMER_REAL, lots.uniform(0.01, 0.05) * (1 + attempt / 2))
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            regard.audit(subject, TEXTS, out=tmp_path, resume=True, **ASKED)
            os._exit(0)
        lots.random()
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert attempt > 0  # it was killed at least once
    assert (tmp_path / "done.json").exists()
    assert found_in(tmp_path) == found_in(undisturbed)


def test_what_changed_is_refused(subject, undisturbed, tmp_path):
    for change in ({"seed": 1}, {"methods": ["raw"]}, {"trials": ["permutation"]}, {"batch_size": 4}, {"shown": 1}):
        (name,) = change
        with pytest.raises(StoreError, match=f"options.{name}"):
            regard.audit(subject, TEXTS, out=undisturbed, resume=True, **(ASKED | change))
    with pytest.raises(StoreError, match=r"data\.drawn"):
        regard.audit(subject, [*TEXTS[:-1], "so new"], out=undisturbed, resume=True, **ASKED)
    other = regard.pooled(toys.irrelevant())
    with pytest.raises(StoreError, match=r"model\."):
        regard.audit(other, TEXTS, out=undisturbed, resume=True, **ASKED)
    with pytest.raises(StoreError, match="resume"):
        regard.audit(subject, TEXTS, out=undisturbed, **ASKED)


def test_a_run_goes_on_with_the_threads_that_it_was_begun_with(subject, undisturbed, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)  # as on another machine
    known = {name: one for name, one in ASKED.items() if name != "threads"}
    before = found_in(undisturbed)
    regard.audit(subject, TEXTS, out=undisturbed, resume=True, **known)
    assert found_in(undisturbed) == before
    with pytest.raises(StoreError, match="threads: was 1, is 2"):
        regard.audit(subject, TEXTS, out=undisturbed, resume=True, threads=2, **known)


def test_a_finished_run_is_read_again_without_work(subject, undisturbed, monkeypatch):
    before = found_in(undisturbed)
    monkeypatch.setattr(Bench, "__call__", None)  # nothing may run
    audit = regard.audit(subject, TEXTS, out=undisturbed, resume=True, **ASKED)
    assert found_in(undisturbed) == before
    assert audit.verdict("raw")["causal"] == "supported"
    assert audit.verdict("random")["causal"] != "supported"


def test_quick_is_what_was_decided():
    assert [name for name, _ in QUICK] == ["agreement", "permutation", "erasure", "uniform", "comprehensiveness"]


def test_all_runs_or_refuses_every_trial(subject):
    steps = [("adversarial", {"steps": 5}), ("stability", {"repeats": 2}), ("randomisation", {"draws": 1})]
    names = regard.list_trials()["name"].tolist()
    rest = [name for name in names if name not in dict(steps)]
    audit = regard.audit(subject, TEXTS[:12], methods=["raw"], trials=[*rest, *steps], shown=0)
    ran, refused = {one.trial for _, one in audit.findings}, {one["trial"] for one in audit.refused}
    assert ran | refused == {*names}
    assert not ran & refused
    trained = {name for name in names if regard.trying.trains(name)}
    assert refused == {"planted", "plausibility", *trained}
    (row,) = [row for row in refusals(audit.refused) if "seeds" in row["trial"]]
    assert {*row["trial"].split(", ")} == trained, "one reason for all"
    assert "rationales" in next(one["why"] for one in audit.refused if one["trial"] == "plausibility")


def test_a_trial_that_breaks_does_not_stop_the_others(subject, monkeypatch):
    broken = regard.trying.found()["permutation"]
    monkeypatch.setitem(regard.trying.found(), "permutation", auditing.replace(broken, function=_breaks))
    audit = regard.audit(subject, TEXTS, methods=["raw"], trials=["permutation", "comprehensiveness"], shown=0)
    assert [one.trial for _, one in audit.findings] == ["comprehensiveness"]
    assert [one["why"] for one in audit.refused] == ["KeyError: 'no such thing'"]


def _breaks(case: Case):
    def work(part):
        raise KeyError("no such thing")

    case.each("breaking", work)


def test_nothing_can_run(subject):
    audit = regard.audit(subject, TEXTS, trials=["plausibility"], shown=0)
    assert audit.findings == ()
    assert len(audit.refused) == 3


def test_texts_stay_out_of_everything(subject, tmp_path):
    secret = [f"xyzzy{number} so good plugh{number}" for number in range(12)]
    told = {"trials": ["agreement", ("adversarial", {"steps": 5})], "methods": ["raw"], "shown": 3}
    regard.audit(subject, secret, out=tmp_path / "open", **told)
    audit = regard.audit(subject, secret, out=tmp_path / "hidden", redact=True, **told)
    audit.to_html(tmp_path / "hidden/report.html")
    kept = {file.name: file.read_bytes() for file in (tmp_path / "hidden").rglob("*") if file.is_file()}
    assert len(kept) > 5
    for name, content in kept.items():
        assert b"xyzzy" not in content, name
        assert b"plugh" not in content, name
    clear = load_audit(tmp_path / "open")
    assert any("xyzzy" in word for word in clear.exhibits[0]["words"])
    assert [one.interval for _, one in clear.findings] == [one.interval for _, one in audit.findings]
    assert len(audit.exhibits[0]["words"]) == len(clear.exhibits[0]["words"])


def test_exhibits_show_what_explain_says(subject, undisturbed):
    audit = load_audit(undisturbed)
    first = audit.exhibits[0]
    text = next(text for text in TEXTS if text.split() == first["words"])
    why = regard.explain(subject, text, method="raw")
    np.testing.assert_allclose(first["scores"]["raw"], why.words()["score"], atol=1e-6)
    (panel,) = first["panels"]
    weights = regard.report.packing.unpack(audit.maps[panel["maps"]])
    np.testing.assert_allclose(weights[0, 0], first["scores"]["raw"], atol=0.05)  # of which 5 % are not kept
    assert panel["effects"][0][0] > 0  # it is what decides


def test_exhibits_of_several_layers(classifier, tokenizer):
    made = regard.text(classifier, tokenizer)
    audit = regard.audit(made, TEXTS[:6], methods=["raw", "rollout"], trials=["permutation"], shown=1)
    (panel,) = audit.exhibits[0]["panels"]
    assert panel["rows"] == panel["keys"]
    assert panel["rows"][0] == "[CLS]"
    assert np.shape(panel["effects"]) == (2, 4)
    traced = regard.trace(made, TEXTS[0] if audit.exhibits[0]["words"] == TEXTS[0].split() else
                          next(t for t in TEXTS if t.split() == audit.exhibits[0]["words"]))  # fmt: skip
    packed = regard.report.packing.unpack(audit.maps[panel["maps"]])
    assert packed.shape == (8, len(panel["rows"]), len(panel["keys"]))
    np.testing.assert_allclose(packed[4:], traced.sites[1].weights()[0].numpy(force=True), atol=0.06)


def test_foresight_names_every_job(subject):
    bench = prepared(subject, TEXTS, **ASKED)
    seen = foresee(bench)
    assert set(zip(seen.jobs["trial"], seen.jobs["method"].fillna(""), strict=True)) == {
        ("comprehensiveness", "raw"), ("comprehensiveness", "random"), ("permutation", ""), ("exhibit", ""),
        ("heads", ""),
    }  # fmt: skip
    assert seen.jobs["units"].sum() == len(bench.units) == 3 * 4 + 2 + 1
    assert seen.seconds > 0
    assert seen.memory > 1e8
    assert 1e3 < seen.disk < 1e7


def test_what_heads_do_is_part_of_an_audit(subject, tmp_path):
    asked = {"methods": ["raw"], "trials": ["permutation"], "shown": 1}
    audit = regard.audit(subject, TEXTS, out=tmp_path / "run", probes=["entropy", "confidence", "importance"], **asked)
    alone = regard.heads(subject, TEXTS, probes=["entropy", "confidence", "importance"], examples=None)
    assert audit.heads is not None
    pd.testing.assert_frame_equal(audit.heads.frame(), alone.frame())
    again = load_audit(tmp_path / "run")
    pd.testing.assert_frame_equal(again.heads.frame(), alone.frame())
    page = again.to_html(tmp_path / "page.html").read_text()
    assert "Heads and layers" in page
    assert "layer 0, head 0: importance 1.00" in page
    none = regard.audit(subject, TEXTS, probes=(), **asked)
    assert none.heads is None
    assert "Heads and layers" not in none.to_html(tmp_path / "none.html").read_text()


def test_probes_of_an_audit_are_checked_first(subject):
    with pytest.raises(OptionError, match="Did you mean 'entropy'"):
        regard.audit(subject, TEXTS, probes=["entropi"])
    with pytest.raises(OptionError, match="has no such option"):
        regard.audit(subject, TEXTS, probes=[("entropy", {"base": 2})])


def test_probes_that_cannot_be_served_do_not_stop_the_trials(subject):
    audit = regard.audit(subject, TEXTS, methods=["raw"], trials=["permutation"], probes=["syntax"], shown=0)
    assert [one.trial for _, one in audit.findings] == ["permutation"]
    (refused,) = audit.refused
    assert refused["trial"] == "heads"
    assert "CoNLL-U" in refused["why"]


def test_units_are_plain_data(subject):
    units = prepared(subject, TEXTS, **ASKED).units
    assert len({unit.id for unit in units}) == len(units)
    unit = units[1]
    plain = json.loads(json.dumps([unit.task, unit.method, unit.places, unit.given]))
    same = Unit(plain[0], plain[1], tuple(plain[2]), plain[3])
    assert (same.id, same.seed) == (unit.id, unit.seed)
    assert Unit(unit.task, unit.method, unit.places[:-1], unit.given).id != unit.id


def test_the_generator_of_torch_is_left_alone(subject):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    regard.audit(subject, TEXTS, **ASKED)
    assert torch.rand(3).equal(expected)
    assert torch.get_num_threads() == threads


def test_differences_between_two_audits(subject, undisturbed, tmp_path):
    regard.audit(regard.pooled(toys.irrelevant()), TEXTS, out=tmp_path, **ASKED)
    table = differences(load_audit(undisturbed), load_audit(tmp_path)).set_index(["method", "trial"])
    causal = table.loc["raw", "comprehensiveness"]
    assert (causal["criterion"], causal["before"]) == ("causal", "supported")
    assert causal["after"] != "supported"
    assert causal["differs"]
    same = differences(load_audit(undisturbed), load_audit(undisturbed))
    assert not same["differs"].any()
    assert (same["before"] == same["after"]).all()
    shuffled = table.loc["raw", "permutation"]
    assert shuffled["difference"] == pytest.approx(shuffled["value_after"] - shuffled["value_before"])
    assert shuffled["difference_low"] <= shuffled["difference"] <= shuffled["difference_high"]


def test_attention_erased_says_nothing_of_rollout(subject):
    audit = regard.audit(subject, TEXTS, methods=["raw", "rollout"], trials=["erasure"], shown=0)
    assert audit.verdict("raw")["causal"] == "supported"
    assert audit.verdict("rollout")["causal"] == "not tested"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"methods": []}, "methods=\\[\\]"),
        ({"methods": "raw"}, "methods='raw' must be a list"),
        ({"methods": ["rollot"]}, "Did you mean 'rollout'"),
        ({"methods": [("raw", {"layers": 3})]}, "raw has no such option"),
        ({"trials": "everything"}, "trial='everything' is not known"),
        ({"trials": ["permutation", ("permutation", {"n": 3})]}, "permutation is there twice"),
        ({"trials": [("permutation", {"n": 0})]}, "n=0"),
        ({"limit": 0}, "limit=0"),
        ({"limit": 3}, "3"),
        ({"workers": 0}, "workers=0"),
        ({"threads": 1.5}, "threads=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"shown": -1}, "shown=-1"),
        ({"redact": "yes"}, "redact='yes'"),
    ],
)
def test_bad_input(subject, change, says, tmp_path):
    with pytest.raises(InputError, match=says):
        regard.audit(subject, TEXTS, out=tmp_path / "run", **(ASKED | change))
    assert not (tmp_path / "run").exists()


def test_not_a_subject():
    with pytest.raises(SubjectError):
        regard.audit(torch.nn.Linear(2, 2), TEXTS)


def test_what_cannot_be_sent_to_other_processes(subject, tmp_path):
    odd = regard.pooled(toys.decisive())
    object.__setattr__(odd, "secret", lambda: None)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(odd)
    with pytest.raises(OptionError, match="workers=1"):
        regard.audit(odd, TEXTS, workers=2, out=tmp_path, **ASKED)


def test_a_worker_that_dies_loses_nothing(tmp_path):
    units = [[Unit("a", None, (number,), {})] for number in range(4)]
    with pytest.raises(regard.errors.WorkerDied, match="--resume"):
        list(run(_dies, units, runner=Runner(workers=2)))


def _dies(unit):
    if multiprocessing.parent_process() is not None:
        os._exit(3)
    return {}, {}


def test_citations_are_whole():
    keys = set(regard.list_trials()["paper"])
    texts = cited(keys)
    assert set(texts) == keys
    assert (
        texts["jain2019attention"] == "Jain & Wallace (2019). Attention is not Explanation. Proceedings of NAACL-HLT."
    )
    assert cited({"no_such_paper"}) == {}


def test_titles_tell_methods_apart():
    assert title_of("raw", {}) == "raw"
    assert title_of("rollout", {"alpha": 0.5}) == "rollout(alpha=0.5)"


def test_a_method_that_is_not_served_is_refused_by_name(subject):
    audit = regard.audit(subject, TEXTS, methods=["raw", "norm"], trials=["comprehensiveness"], shown=1)
    served = {title for title, _ in audit.findings}
    reasons = {one["method"]: one["why"] for one in audit.refused}
    assert served | {*reasons} == {"raw", "norm"}
    if "norm" in reasons:
        assert "norm" in reasons["norm"]
        assert "norm" in audit.exhibits[0]["refused"]


def test_refusals_are_not_served_errors():
    assert issubclass(NotServed, InputError)


def test_no_more_examples_are_shown_than_there_are():
    subject = regard.pooled(regard.models.toys.decisive())
    texts = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad", "so good"]
    found = regard.audit(subject, texts, methods=["raw"], trials=["comprehensiveness"], probes=())
    assert len(found.exhibits) == 6
