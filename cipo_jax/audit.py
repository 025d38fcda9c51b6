"""Audits transcripts of any search agent: how much each action owes to the evidence before it, and to which passage.

    python -m cipo_jax.audit --model=MODEL --trajectories=transcripts.jsonl --out=audit

MODEL is a Hugging Face folder or a .gguf file of a supported architecture; the transcripts may be another model's. They are
Search-R1 text, chat messages with tool results, or this project's own token ids, as a JSON array or JSON lines.

OUT then holds turns.jsonl (a line per retrieval turn), summary.json and audit.html: tokens coloured by how much the evidence
changed them, what each passage did, and the answers that owe least to their evidence first. Scores are kept as they come:
the same command, given again, goes on where it was stopped.

    --study=faithfulness   masked against removed over every mask, and the lag at which evidence first matters
    --study=behaviour      regenerates the next action with the evidence deleted and replaced

Settings:  --gin_names=AuditConfig
"""

import json
from pathlib import Path

import jax
from absl import flags
from rich.console import Console

from cipo_jax import cli
from cipo_jax.data.tokenizer import load_tokenizer, model_tokenizer
from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.evaluation.audit import AuditConfig, audit, summarise_audit, write_turns
from cipo_jax.evaluation.audit_behaviour import BehaviourStudy, behaviour, behaviour_table
from cipo_jax.evaluation.audit_page import write_page
from cipo_jax.evaluation.audit_store import BatchStore
from cipo_jax.evaluation.audit_studies import Faithfulness, faithfulness, faithfulness_table, write_faithfulness
from cipo_jax.evaluation.transcripts import read_transcripts
from cipo_jax.models.weights import load_decoder
from cipo_jax.training.progress import Progress
from cipo_jax.training.run_dir import write_atomic

FLAGS = flags.FLAGS
flags.DEFINE_string("model", None, "Hugging Face folder or .gguf file.")
flags.DEFINE_string("trajectories", None, "File of transcripts.")
if "out" not in FLAGS:  # evaluate has one too; tests import both
    flags.DEFINE_string("out", None, "Folder for the results; created.")
flags.DEFINE_string("tokenizer", None, "Folder of the tokenizer; the one beside or inside the model by default.")
flags.DEFINE_enum("study", None, ["faithfulness", "behaviour"], "Run this study instead of the audit.")
flags.DEFINE_integer("limit", None, "Read no more than this many transcripts.")
flags.DEFINE_integer("page_limit", 200, "Transcripts on the page.")


def main() -> None:
    for name in ("model", "trajectories", "out"):
        if not FLAGS[name].value:
            raise UserError(f"--{name} is not set; see --help.")
    console = Console()
    transcripts, unreadable = read_transcripts(FLAGS.trajectories)
    transcripts = transcripts[: FLAGS.limit]
    if not transcripts:
        raise UserError(
            f"{FLAGS.trajectories} holds no readable transcript ({len(unreadable)} unreadable): {unreadable[:1]}."
        )
    out, model_path = Path(FLAGS.out), Path(FLAGS.model)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(FLAGS.tokenizer) if FLAGS.tokenizer else model_tokenizer(model_path)
    rules = ShardingRules(mesh())
    model = load_decoder(model_path, rules, dtype="float32", param_dtype="float32", remat=False)
    config = AuditConfig()
    arguments = transcripts, model, rules, tokenizer, config
    about = {
        "model": str(model_path.resolve()),
        "trajectories": str(Path(FLAGS.trajectories).resolve()),
        "transcripts": len(transcripts),
        "config": repr(config),
    }
    progress = Progress()
    if FLAGS.study == "behaviour":
        found = behaviour(*arguments, BehaviourStudy(), progress)
    else:
        with progress.phase(FLAGS.study or "audit", len(transcripts)) as phase:
            if FLAGS.study:
                found = faithfulness(*arguments, Faithfulness(), phase.advance, BatchStore(out / "grid.jsonl", about))
            else:
                audited, skipped = audit(*arguments, phase.advance, BatchStore(out / "scored.jsonl", about))
    if FLAGS.study == "faithfulness":
        written = write_faithfulness(out, found)
        console.print(faithfulness_table(found))
        console.print(f"evidence first matters at lag {found['lag']['first']}; skipped {found['skipped']}")
    elif FLAGS.study == "behaviour":
        written = [out / "behaviour.json"]
        write_atomic(written[0], json.dumps(found, indent=1) + "\n")
        console.print(behaviour_table(found))
    else:
        summary = summarise_audit(audited, skipped, unreadable)
        summary |= {"model": str(model_path), "unreadable": unreadable[:20], "device": jax.devices()[0].device_kind}
        written = [out / "turns.jsonl", out / "summary.json", out / "audit.html"]
        write_turns(written[0], audited)
        write_atomic(written[1], json.dumps(summary, indent=1) + "\n")
        title = f"{Path(FLAGS.trajectories).name} under {model_path.name}"
        first = config.counterfactuals[0].name
        write_page(written[2], title, audited, summary, tokenizer, first, FLAGS.page_limit)
        console.print_json(data={k: v for k, v in summary.items() if k != "unreadable"})
    for path in written:
        console.print(str(path), soft_wrap=True)


if __name__ == "__main__":
    cli.run(main)
