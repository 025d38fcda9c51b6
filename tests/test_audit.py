"""The audit end to end on a small random model: records, page, studies, and errors a person can act on."""

import json

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from cipo_jax import audit, config
from cipo_jax.data.names import ALL_NAMES
from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.evaluation.audit import AuditConfig, TranscriptScorer, action_kind
from cipo_jax.evaluation.audit_behaviour import Generator, auc, cut, decision
from cipo_jax.evaluation.audit_page import histogram
from cipo_jax.evaluation.audit_studies import Faithfulness, compare, lags
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import init_decoder
from cipo_jax.models.export import export_decoder
from cipo_jax.models.weights import load_decoder

CITIES = sorted(ALL_NAMES)[:5]  # words that the tokenizer knows


def record(i: int) -> dict:
    city = CITIES[i % len(CITIES)]
    docs = f"Doc 1(Title: a) The capital is {city}.\nDoc 2(Title: b) The river is long."
    information = f"\n\n<information>{docs}</information>\n\n"
    search = "<think> so </think><search> capital </search>"
    answer = f"<think> so the capital is {city} </think><answer> {city} </answer>"
    turns = [search + information] * (1 + i % 2) + [answer]
    if i == 3:
        turns = turns[:-1]  # ends on evidence
    return {
        "id": f"q{i}",
        "question": "Which?",
        "golds": [city],
        "prompt": "Which is it?\n",
        "response": "".join(turns),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder as a user would have it: a Qwen3 checkpoint with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    shape = DecoderConfig(len(tokenizer), width=32, depth=1, heads=4, kv_heads=2, head_dim=8, ffn=48)
    params = jax.tree.map(lambda x: 2 * x, init_decoder(shape, 0, ShardingRules(mesh(devices=jax.devices()[:1])))[1])
    export_decoder(folder / "m", shape, params, tokenizer=tokenizer)
    return folder / "m"


@pytest.fixture
def run(model, tmp_path, monkeypatch, clean_gin):
    transcripts = tmp_path / "transcripts.jsonl"
    transcripts.write_text("\n".join(json.dumps(record(i)) for i in range(8)) + '\n{"id": 1}\n')
    monkeypatch.setattr(audit, "mesh", lambda: mesh(devices=jax.devices()[:1]))
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["audit"])

    def call(bindings=(), **given):
        config.parse([], ["AuditConfig.places = 256", "AuditConfig.block = 64", *bindings])
        arguments = dict(model=str(model), trajectories=str(transcripts), out=str(tmp_path / "out")) | given
        with flagsaver.flagsaver(**arguments):
            audit.main()
        return tmp_path / "out"

    return call


def test_audit_writes_records_summary_and_page(run):
    out = run()
    records = [json.loads(line) for line in (out / "turns.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    # Eight transcripts with one or two searches; the last search of q3 has no action behind it.
    assert [(r["id"], r["turn"]) for r in records] == [
        ("q0", 0), ("q1", 0), ("q1", 1), ("q2", 0), ("q3", 0), ("q4", 0), ("q5", 0), ("q5", 1), ("q6", 0), ("q7", 0),
        ("q7", 1),
    ]  # fmt: skip
    assert summary["turns_scored"] == 11 and summary["turns_skipped"] == {"no_next_action": 1}
    assert summary["records_unreadable"] == 1
    for r in records:
        assert set(r["ealr"]) == {"masked", "removed"} and all(np.isfinite(list(r["ealr"].values())))
        assert r["action"] == (
            "search" if (r["id"], r["turn"]) in {("q1", 0), ("q3", 0), ("q5", 0), ("q7", 0)} else "answer"
        )
        assert [p["holds_answer"] for p in r["passages"]] == [True, False]
        assert all(p["used"] == (p["ealr"] > 0.05) for p in r["passages"])
    assert summary["passages_holds_answer"]["n"] == summary["passages_holds_none"]["n"] == 11
    answers = [r for r in records if r["action"] == "answer"]
    assert all(r["prior_driven_candidate"] == (r["ealr"]["masked"] < 0.05) for r in answers)

    page = (out / "audit.html").read_text()
    assert page.count("<article") == 8 and "http" not in page.replace("http-equiv", "")
    last = {r["id"]: r["ealr"]["masked"] for r in records}  # candidates first, then by EALR
    candidates = {r["id"] for r in answers if r["prior_driven_candidate"]}
    shown = [part.split('"')[0] for part in page.split('data-question="')[1:]]
    assert shown[: len(candidates)] == sorted(candidates & set(shown), key=last.get) or not candidates
    assert page.count("prior-driven candidate</span>") == len(candidates)


def test_a_stopped_audit_goes_on_where_it_was(run, monkeypatch):
    calls = []
    score = TranscriptScorer.score

    def counted(self, part, rows):
        calls.append(len(part))
        return score(self, part, rows)

    monkeypatch.setattr(TranscriptScorer, "score", counted)
    out = run()
    whole = {name: (out / name).read_text() for name in ("turns.jsonl", "audit.html", "summary.json")}
    batches = len(calls)
    assert batches > 1 and sum(calls) == 8
    stored = (out / "scored.jsonl").read_text()
    for kept, again in ((stored, 0), (stored[:-9], 1), ("nonsense", batches)):
        (out / "scored.jsonl").write_text(kept)
        calls.clear()
        run()
        assert len(calls) == again
        assert {name: (out / name).read_text() for name in whole} == whole
        assert (out / "scored.jsonl").read_text() == stored
    calls.clear()
    run(["AuditConfig.passages = False"])  # another question
    assert len(calls) == batches


def test_faithfulness_study_covers_the_grid(run):
    out = run(study="faithfulness")
    found = json.loads((out / "faithfulness.json").read_text())
    assert (out / "faithfulness.png").stat().st_size > 1000
    assert found["transitions"] == 11
    assert set(found["grid"]) == {
        f"{rows}/{span}/snapshot" for rows in ("post_evidence", "predictor", "action") for span in ("content", "block")
    }
    assert all(n["n"] == 11 for n in found["grid"].values())
    # Deletion and post_evidence masking see the same tokens; only positions differ.
    assert (
        found["grid"]["post_evidence/content/snapshot"]["mean_abs_difference"]
        < (found["grid"]["action/block/snapshot"]["mean_abs_difference"])
    )
    assert sum(found["lag"]["first"].values()) == 11 and found["lag"]["with_two_later_actions"] == 3


def test_behaviour_study_regenerates_actions(run, model):
    out = run(["BehaviourStudy.new_tokens = 6", "BehaviourStudy.force_call = True"], study="behaviour")
    found = json.loads((out / "behaviour.json").read_text())
    assert found["transitions"] == 11
    for r in found["records"]:
        assert all(text.startswith(f"<{r['action']}>") for text in r["text"].values())
        for variant in ("deleted", "replaced"):
            same = decision(r["text"][variant]) == decision(r["text"]["visible"])
            assert r["changed"][variant] == (not same)


def test_generation_is_greedy_and_does_not_depend_on_its_batch(model):
    rules = ShardingRules(mesh(devices=jax.devices()[:1]))
    loaded, tokenizer = load_decoder(model, rules), build_tokenizer()
    prefixes = [tokenizer.encode(t) for t in ("Which is it?", "So the capital is Paris .", "a")]
    together = Generator(loaded, rules, tokenizer, 5, 3)(prefixes)
    alone = Generator(loaded, rules, tokenizer, 5, 1)
    assert together == [alone([p])[0] for p in prefixes]
    longer = Generator(loaded, rules, tokenizer, 1, 3)
    for prefix, text in zip(prefixes, together):  # one token at a time, each from the whole prefix
        ids = list(prefix)
        for _ in range(5):
            ids += tokenizer.encode(longer([ids])[0])
        assert tokenizer.decode(ids[len(prefix) :]) == text


def test_what_is_missing_is_named(run, tmp_path):
    for given, match in (
        ({"model": None}, "--model is not set"),
        ({"trajectories": str(tmp_path / "none.jsonl")}, "does not exist"),
    ):
        with pytest.raises(UserError, match=match):
            run(**given)
    (tmp_path / "empty.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(UserError, match="no readable transcript"):
        run(trajectories=str(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match="counterfactuals is empty"):
        AuditConfig(counterfactuals=())


def test_actions_are_cut_and_read():
    assert cut("<think> a </think><search> b </search> junk </answer>") == "<think> a </think><search> b </search>"
    assert decision("<answer> The  Paris! </answer>") == ("answer", "paris")
    assert decision("well") == ("other", "well")
    assert action_kind('<tool_call>\n{"name": "s"}\n</tool_call><|im_end|>') == "search"
    assert action_kind("Paris<|im_end|>") == "answer"
    assert action_kind("<search> a") == "other"


def test_numbers_of_the_studies_by_hand():
    assert auc([1, 2, 3, 4], np.asarray([False, False, True, True])) == 1.0
    assert auc([1, 1], np.asarray([True, False])) == 0.5
    assert np.isnan(auc([1, 2], np.asarray([True, True])))
    found = compare(np.asarray([0.1, 0.2, -0.3]), np.asarray([0.2, 0.4, 0.3]), Faithfulness())
    assert found["mean_abs_difference"] == pytest.approx(0.3) and found["sign_flips"] == pytest.approx(1 / 3)
    assert found["spearman"] == pytest.approx(0.5) and not found["faithful"]
    assert compare(np.asarray([1.0]), np.asarray([1.0]), Faithfulness()) == {"n": 1}
    counted = lags([{1: 0.2, 2: 0.0}, {1: 0.0, 2: -0.3}, {1: 0.01}, {1: 0.0, 2: 0.0}], 0.05)
    assert counted == {"first": {"1": 1, "2": 1, "never": 2}, "with_two_later_actions": 3, "later_share": 1 / 3}
    assert histogram([0.0, 0.0], "flat").count("<rect") == 30
