"""kvcomp as a model of lm-evaluation-harness, over one `kvcomp --batch` process.

The harness is the package lm_eval; this file is written against 0.4.13.

    python data/lm_eval_kvcomp.py --model kvcomp \
        --model_args model=models/kvcomp-tiny,method=dililazy,budget=64 \
        --include_path data/lm_eval --tasks kvcomp_facts --apply_chat_template

It is lm_eval's own command line, which knows one model more. --model_args takes
    model     what -m takes; without it the shipped model
    program   kvcomp itself; without it the one beside this file's folder
    args      options of the command line, "-c 0 -t 4"
    method, budget, ..   what a request of --batch takes: every method's options, with _ or - inside the names
Requests are played one after the other, with greedy decoding unless the task samples. With
--apply_chat_template the messages go to kvcomp, whose template writes them; without it a text goes in as it
is. Texts and scores do not depend on the order of requests.
"""
import json
import os
import shlex
import subprocess
import sys

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as e:
    sys.exit("lm_eval_kvcomp.py needs lm-evaluation-harness, the package lm_eval (%s)" % e)

HERE = os.path.dirname(os.path.abspath(__file__))


class Messages(str):
    """A context that apply_chat_template wrote.

    The harness hands contexts on as they are. The type tells one from a data set's text, which may look the
    same and is not to be trusted.
    """


def asked(context):
    """The fields of a request for a context: a plain text, or messages."""
    if isinstance(context, Messages):
        return {"messages": json.loads(context)}
    return {"prompt": context, "raw": True}


@register_model("kvcomp")
class Kvcomp(LM):
    """The model that lm_eval knows as kvcomp: a process, and the options of every request to it."""

    def __init__(self, model="", program=os.path.join(HERE, "..", "kvcomp"), args="",
                 batch_size=None, max_batch_size=None, device=None, **options):
        super().__init__()
        command = [program, "--batch", "-", "--quiet"]
        command += ["-m", model] if model else []
        command += shlex.split(str(args))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        encoding="utf-8")
        self.options = options                          # of every request
        self.name = model or "kvcomp-tiny"

    def ask(self, **request):
        """What kvcomp answers to one request; its error becomes an exception."""
        self.process.stdin.write(json.dumps(request | self.options) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("kvcomp has left, exit code %s" % self.process.wait())
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError("kvcomp: " + answer["error"])
        return answer

    def score(self, context, continuation):
        """The log-probability of a continuation, and whether it is what greedy decoding would write."""
        request = asked(context)
        if "prompt" in request:
            bare = context.rstrip()     # blanks between the texts belong to the continuation's first token
            request["prompt"], continuation = bare, context[len(bare):] + continuation
        answer = self.ask(**request, continuation=continuation)
        return answer["logprob"], answer["greedy"]

    def loglikelihood(self, requests):
        """The score of each pair of a context and a continuation."""
        scores = []
        for r in requests:
            scores.append(self.score(*r.args))
            self.cache_hook.add_partial("loglikelihood", r.args, scores[-1])
        return scores

    def loglikelihood_rolling(self, requests):
        """Whole texts, each behind the token that begins one.

        A text has to fit into the context (args=-c N).
        """
        return [self.score("", r.args[0])[0] for r in requests]

    def generate_until(self, requests):
        """What kvcomp writes behind each context, up to a stop text or the most tokens."""
        texts = []
        for r in requests:
            context, how = r.args
            until = how.get("until") or []
            request = asked(context) | {"max_tokens": how.get("max_gen_toks", 256)}
            until = [until] if isinstance(until, str) else until
            request["stop"] = [s for s in until if s]
            if how.get("do_sample"):
                request |= {
                    "temp": how.get("temperature", 1.0),
                    "top_p": how.get("top_p", 1.0),
                    "top_k": how.get("top_k", 0),
                    "min_p": 0,
                }
            texts.append(self.ask(**request)["text"])
            self.cache_hook.add_partial("generate_until", r.args, texts[-1])
        return texts

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        """The messages as they are: kvcomp's template writes them."""
        return Messages(json.dumps(chat_history))

    @property
    def tokenizer_name(self):
        """What lm_eval files its cached requests under."""
        return self.name


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate
    sys.exit(cli_evaluate())
