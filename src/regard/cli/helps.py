"""What `--help` says of each command: what it is for, and examples."""

# `regard --help` begins with these; a test runs them.
EXAMPLES = {
    "regard audit --planted keyword": "a toy whose truth is known",
    "regard doctor --model path/to/classifier": "what can be asked of yours",
    "regard audit --model path/to/classifier --data reviews.csv": "",
}
COMMANDS = {  # in the order in which they are used
    "audit": "Put the explanations of a model on trial, and judge them.",
    "report": "Write the page of an audit anew, without the model.",
    "diff": "Tell what changed between two audits.",
    "doctor": "Find out what can be asked of your model. Start here.",
    "trace": "Show what each attention site of a model did.",
    "explain": "Attribute a prediction to words, or to patches of a picture.",
    "compare": "Put methods side by side on your data.",
    "trial": "Run a single trial, in full.",
    "heads": "Ask which heads matter, where they look, and what they do.",
    "fit": "Train a transformer on a table, and save it.",
    "methods": "List the methods: formula, cost, paper.",
    "trials": "List the trials: claim, reference, paper.",
    "probes": "List the probes of heads and layers.",
}
AUDIT_HELP = """Put the explanations of a model on trial and judge them: a scorecard, and a report to read.

Each criterion is supported, not supported or inconclusive, on your model and data. All that was found is kept in --out:
what was stopped goes on with --resume, and `regard report` and `regard diff` need no model.

Exit codes: 0; 1: a criterion of --require is not met; 2: bad input, or nothing ran; 3: required, but not settled; 130:
stopped. Every option can be given as REGARD_AUDIT_LIMIT=100 and in --config, too: command line, environment, file,
defaults, in this order.

Examples:

* `regard audit --model path/to/classifier --data reviews.csv --html report.html`
* `regard audit --model path/to/classifier --data reviews.csv --trials all --dry-run --workers 2`
* `regard audit --model path/to/classifier --data reviews.csv --methods rollout,gradient:norm=l2 --trials agreement`
* `regard audit --model path/to/classifier --data reviews.csv --require consistent,causal --json > findings.json`
* `regard audit --recipe fine_tune --model path/to/encoder --data reviews.csv --trials all`
* `regard audit --config audit.toml --limit 100 --resume`
* `regard audit --model path/to/classifier --data reviews.csv --runner ray --workers 4`
* `regard audit --model /shared/classifier --data reviews.csv --runner ray --address auto --gpus-per-worker 1`
"""
FIT_HELP = """Train a transformer on a table, and save it, to be audited.

Columns of texts are categories, those of numbers are numbers; cells may be missing. A part of the rows is held out: the
score is that of these, and they are kept beside the model. Needs regard[tabular].

Examples:

* `regard fit --data adult.csv --target-column income --out models/adult`
* `regard fit --model saint --data adult.csv --target-column income --out models/saint --limit 5000 --epochs 20`
* `regard audit --model models/adult --data models/adult/held_out.csv --target-column income`
"""
REPORT_HELP = """Write the page of a run anew from what is stored; without the model, and always the same bytes.

Examples:

* `regard report runs/classifier-reviews`
* `regard report runs/classifier-reviews --html report.html --json`
"""
DIFF_HELP = """Tell what changed between two runs: criterion by criterion, with intervals.

Examples:

* `regard diff runs/classifier-reviews runs/distilled-reviews`
* `regard diff runs/before runs/after --json`
"""

TRACE_HELP = """Run a model once on your texts and show what each of its attention sites did.

Examples:

* `regard trace --model path/to/classifier --text "a moving film"`
* `regard trace --model SmolLM2.gguf --text "The capital of France is" --json`
* `regard trace --model org/name --text "first" --text "second" --over-limit truncate`
"""
DOCTOR_HELP = """Find out what regard can do with your model, how exactly, and at what cost. Start here.

The model is traced, differentiated and edited on a text or picture of yours, or on a stand-in. Exit code 1 if something
does not work.

Examples:

* `regard doctor --model path/to/classifier`
* `regard doctor --model SmolLM2.gguf --text "The capital of France is" --json`
* `regard doctor --model path/to/vit --image cat.png`
"""
EXPLAIN_HELP = """Attribute a prediction to the words of a text, or the patches of a picture.

Examples:

* `regard explain --model path/to/classifier --text "a moving film" --method grad_rollout --target good`
* `regard explain --model path/to/encoder --text "a moving film" --method norm --option layers=rollout --html why.html`
* `regard explain --model SmolLM2.gguf --text "The capital of France is" --method grad_rollout --generate 5`
* `regard explain --model path/to/classifier --texts reviews.txt --method rollout --json > explanations.jsonl`
"""
HEADS_HELP = """Ask what the heads and layers of a model do: where they look, which matter, what they are for.

Without --probes a first look: entropy, distance, share on special tokens, positional heads, importance. Some probes
need labels, a file of CoNLL-U, GAP or facts, or a language model: `regard probes` says which.

Examples:

* `regard heads --model path/to/classifier --data reviews.csv --html heads.html`
* `regard heads --model path/to/classifier --data reviews.csv --probes importance,ablation:how=mean,pruning`
* `regard heads --model path/to/encoder --data en_ewt-ud-test.conllu --probes syntax,tags --limit 2000`
* `regard heads --model SmolLM2.gguf --data reviews.csv --probes induction,duplicate,copying --json`
"""
PROBES_HELP = """List the probes: what each finds out, what it needs, and where it was published.

Examples:

* `regard probes`
* `regard probes --json`
"""
METHODS_HELP = """List the methods: what each computes, what it needs and costs, and where it was published.

Examples:

* `regard methods`
* `regard methods --json`
"""
COMPARE_HELP = """Put methods side by side on your data: which agree, and which point at words that matter?

Examples:

* `regard compare --model path/to/classifier --data reviews.csv --html comparison.html`
* `regard compare --model path/to/classifier --data posts.jsonl --method rollout --method leave_one_out`
* `regard compare --model path/to/classifier --data reviews.csv --method gradient:norm=l2,through_attention=false`
* `regard compare --planted shortcut`
* `regard compare --model /shared/classifier --data reviews.csv --limit 2000 --runner ray --address auto`
"""
TRIAL_HELP = """Put attention on trial, on your model and data: a claim that can be false, with interval and reference.

Examples:

* `regard trial permutation --model path/to/classifier --data reviews.csv`
* `regard trial agreement --model path/to/classifier --data reviews.csv --method rollout --html agreement.html`
* `regard trial adversarial --model path/to/classifier --data reviews.csv --option steps=200 --sites all --json`
* `regard trial planted --planted keyword --method raw`
* `regard trial adversary --recipe attention_classifier --data reviews.csv --option seeds=3 --option lambdas=[0,0.01]`
"""
TRIALS_HELP = """List the trials: what each claims, what it is held against, what it needs, and where it was published.

Examples:

* `regard trials`
* `regard trials --json`
"""
