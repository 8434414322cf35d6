"""Holds lm-evaluation-harness over kvcomp --batch against kvcomp's own evaluation of the same questions.

    python data/lm_eval/check.py

For every method the share of right answers must be the same, and the log-probability of a right answer that
of --eval-out.
"""
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval_kvcomp import Kvcomp

ITEMS = "data/lm_eval/facts.jsonl"
tasks = TaskManager(include_path="data/lm_eval", include_defaults=False)
bad = 0
for method, budget in [("full", 0), ("snapkv", 80), ("h2o", 48)]:
    # kvcomp's own
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        command = ["./kvcomp", "-q", "-t", "1", "--eval", ITEMS, "--compare", method,
                   "--eval-out", out, "--json"]
        command += ["--budgets", str(budget)] if budget else []
        row = json.loads(subprocess.check_output(command))
        lines = [json.loads(line) for line in open(out)]

    # the harness's
    lm = Kvcomp(args="-t 1", method=method, budget=budget)
    result = simple_evaluate(lm, tasks=["kvcomp_facts"], task_manager=tasks, apply_chat_template=True)
    score = result["results"]["kvcomp_facts"]["exact_match,number"]

    # a right answer
    worst = 0
    for item, line in zip(map(json.loads, open(ITEMS)), (line["answers"][0] for line in lines)):
        asked = lm.apply_chat_template(item["messages"])
        given = Instance("loglikelihood", {}, (asked, item["answers"][0]), 0)
        (logprob, _), = lm.loglikelihood([given])
        worst = max(worst, abs(logprob + line["nll"] * line["predicted"]))
    same = score == row["score"] and worst < 1e-9 and len(lines) == 8
    bad += not same
    print("%s %d: score %g, kvcomp's %g; log-probabilities differ by %.1g: %s"
          % (method, budget, score, row["score"], worst, "the same" if same else "DIFFERENT"))

# Plain texts: blanks go with what stands behind them; a whole text follows the token that begins one
plain = Kvcomp(args="-t 1")
joined = plain.loglikelihood([Instance("loglikelihood", {}, ("Tell me", " a story"), 0)])[0]
apart = plain.loglikelihood([Instance("loglikelihood", {}, ("Tell me ", "a story"), 0)])[0]
rolling = plain.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("Tell me a story",), 0)])
until = Instance("generate_until", {}, ("Once upon a time", {"until": ["."], "max_gen_toks": 40}), 0)
bad += (joined != apart
        or rolling != [plain.score("", "Tell me a story")[0]]
        or "." in plain.generate_until([until])[0])
print("plain texts: %g and %g, rolling %g" % (joined[0], apart[0], rolling[0]))
sys.exit(bad)
