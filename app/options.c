// app/options.c - the options of the program.
#define _GNU_SOURCE
#include "options.h"
#include <limits.h>
#include <stb/stb_ds.h>

// ==================================================================================================== OPTIONS OF THE PROGRAM
// One table has every option that is no method's: its name, its kind, its default, what --help says of it,
// its bounds, and in which runs it has an effect (Opt in lib/base.h). Parsing, help, suggestions and what a run says of
// options without effect all read it, as they read the tables of the methods, so a new option is one line here. Another
// table, no_options, has options that are gone, or other programs' names of ours, and what to use instead.
//
// An option stays if a claim, a table of NOTES or a user needs it. One that many methods share stands here,
// under Compression, and each of them names it in Method.uses.

enum {                      // what a run does, one bit each: Opt.runs
    RUN_CHAT = 1, RUN_PROMPT = 2, RUN_IDS = 4, RUN_EVAL = 8, RUN_REPORT = 16, RUN_BENCH = 32,
    RUN_CALIBRATE = 64, RUN_INSPECT = 128, RUN_TOKENS = 256, RUN_DEMO = 512, RUN_PLAN = 1024,
    RUN_MERGE = 2048, RUN_BATCH = 4096,
    RUN_TALKS = RUN_CHAT | RUN_PROMPT,                          // replies are sampled
    RUN_SAMPLES = RUN_TALKS | RUN_BATCH,
    RUN_REPLIES = RUN_SAMPLES | RUN_EVAL | RUN_REPORT | RUN_DEMO, // replies are made
    RUN_SESSION = RUN_REPLIES | RUN_IDS | RUN_BENCH | RUN_PLAN,
};

const Opt program_options[] = {
    // Model and run
    { "model",         's', "",
      "a Hugging Face folder, or org/name in the hub's cache (default: the shipped model)", .flag = "-m",
      .part = "Model and run" },
    { "device",        'c', "auto|cpu|cuda",
      "where to run; auto: a GPU that answers, has room and computes what the CPU computes, else the CPU",
      .flag = "-d" },
    { "threads",       'i', "0",    "threads, 0: one for a small model, all physical cores for others", 0, 1024,
      .flag = "-t" },
    { "ctx-size",      'i', "4096",
      "most rows a head may hold in a chat (--ids is replayed whatever its length); 0: the model's own limit",
      0, 1 << 30, .flag = "-c" },
    { "batch-size",    'i', "0",
      "rows of a prefill block, 0: 512, on a GPU 2048; changes speed and memory, never a logit (on a GPU: their "
      "rounding)", 0, 1 << 20, .flag = "-b" },
    { "chunk",         'i', "0",
      "a prefill goes through the model in passes of so many tokens, and methods that drop rows do so at the end "
      "of each; 0: off", 0, 1 << 30 },
    { "exact",         'b', "0",
      "on a GPU: a prefill's products with 16-bit weights twice (activations, and what rounding left), "
      "attention in f32" },
    { "weights",       'c', "file|q8_0",
      "matrices as the file has them, or rounded to 8 bits (8.5 with their scales) in memory; on the CPU" },
    { "bf16-terms",    'c', "3|2|1",
      "BF16 numbers that make an activation, with BF16 weights: 3 as exact as f32; 2 (3e-6 off) faster on AMX, "
      "1 (.002 off) on AVX-512 BF16, too" },
    { "ctk",           'c', "f16|f32|bf16|q8_0|q4", "how K rows are stored", .flag = "-ctk" },
    { "ctv",           'c', "f16|f32|bf16|q8_0|q4", "how V rows are stored", .flag = "-ctv" },
    { "tokenizer",     's', "",     "tokenizer.json, or its folder, instead of the model's" },
    { "chat-template", 's', "",     "template by name, or a file, instead of the model's",
      .runs = RUN_REPLIES | RUN_TOKENS },
    { "synthetic",     's', "",
      "random weights of a shape: llama-3.2-1b, llama-3.1-8b, qwen3-4b, tiny, or L..,H..,G..,D..,C..,F..,V.." },
    { "inspect",       'b', "0",    "print config, tensors, bytes, KV bytes per token, and leave",
      .runs = RUN_INSPECT },
    { "plan",          'b', "0",
      "print what a dialogue of -c tokens takes, on a GPU every allocation, and leave; needs no weights",
      .runs = RUN_PLAN },

    // Prompt
    { "prompt",        's', "",     "text to answer once", .runs = RUN_PROMPT | RUN_TOKENS, .flag = "-p",
      .part = "Prompt" },
    { "file",          'p', "",
      "the same from a file; - is standard input; with --eval ppl or kld: the text; with --calibrate: the hay",
      .runs = RUN_PROMPT | RUN_TOKENS | RUN_EVAL | RUN_CALIBRATE, .flag = "-f" },
    { "system",        's', "",     "system message",
      .runs = RUN_SAMPLES | RUN_EVAL | RUN_REPORT | RUN_TOKENS, .flag = "-sys" },
    { "n-predict",     'i', "-1",   "most tokens to make, -1: no limit in a chat, 256 otherwise", -1, INT_MAX,
      .runs = RUN_SAMPLES | RUN_EVAL | RUN_REPORT, .flag = "-n" },
    { "raw",           'b', "0",    "no chat template: the text as it is", .runs = RUN_REPLIES | RUN_TOKENS },
    { "parse-special", 'b', "0",    "read special tokens in the prompt's text",
      .runs = RUN_REPLIES | RUN_TOKENS },
    { "ignore-eos",    'b', "0",    "go on after an end token", .runs = RUN_REPLIES },
    { "no-think",      'b', "0",    "turn a thinking model's thoughts off", .runs = RUN_REPLIES | RUN_TOKENS },
    { "demo",          'b', "0",
      "a scripted dialogue through several methods side by side: what each answers, holds, reads",
      .runs = RUN_DEMO },
    { "session",       'p', "",
      "go on with the dialogue in this file, and save it after every turn", .runs = RUN_TALKS },

    // Sampling
    { "temp",          'f', "0.8",  "temperature, 0: greedy", 0, 100, .runs = RUN_SAMPLES, .part = "Sampling" },
    { "top-k",         'i', "40",   "0: off", 0, INT_MAX, .runs = RUN_SAMPLES },
    { "top-p",         'f', "0.95", "1: off", 0, 1, .runs = RUN_SAMPLES },
    { "min-p",         'f', "0.05", "0: off", 0, 1, .runs = RUN_SAMPLES },
    { "seed",          'i', "-1",   "of the sampler, -1: from the clock", .flag = "-s" },

    // Compression
    { "method",        's', "full", "NAME or NAME+NAME, see --list-methods", .runs = RUN_SESSION,
      .part = "Compression" },
    { "budget",        'i', "0",
      "rows that a KV head keeps or reads, window included (dililazy, headkv: a query head, on average), 0: the method's "
      "default", 0, INT_MAX, .runs = RUN_SESSION },
    { "ratio",         'f', "0",
      "share of the rows to remove at each prefill end, instead of --budget, 0: off", 0, 0.9999,
      .runs = RUN_SESSION },
    { "sink",          'i', "-1",
      "first tokens always kept or read; -1: 4 (streaming, expected-attention, loopserve, sonic) or 16 (pats, lychee)",
      -1, INT_MAX },
    { "obs-window",    'i', "32",   "last queries that score the rows (snapkv, adakv, pyramidkv)", 1, 1 << 20 },
    { "kernel",        'i', "7",    "pooling width of those scores, odd", 1, 1023 },
    { "pool",          'c', "max|avg", "what a neighbourhood of those scores becomes" },
    { "full-layers",   'i', "2",    "first layers that read every row (quest, lychee)", 0, 1 << 20 },
    { "head-scores",   'p', "",
      "scores of heads (dililazy, headkv); default: head_scores.json in the model's folder" },
    { "head-beta",     'f', "0",
      "1/beta of the budget is shared out by those scores, the rest is the same for all; 0: 1.351 (headkv 1.2)",
      0, 1e9 },
    { "paper",         'b', "0",
      "what the paper has and we do otherwise: loopserve: alpha .955, variant a; lychee: Eq. 2's bound as the score; "
      "sonic: the exact mask, the whole history in one pass every turn" },

    // Output
    { "json",          'b', "0",    "the numbers of the run on stdout, as one JSON object",
      .runs = RUN_TALKS | RUN_IDS | RUN_EVAL | RUN_BENCH | RUN_MERGE, .part = "Output" },
    { "json-rows",     'b', "0",    "with --json: the rows kept by every head", .runs = RUN_TALKS | RUN_IDS },
    { "csv",           'b', "0",    "the same names as --json, as a table",
      .runs = RUN_EVAL | RUN_BENCH | RUN_MERGE },
    { "dump-tokens",   'b', "0",    "print the ids of -p on one line, or of the messages of --batch, and leave",
      .runs = RUN_TOKENS },
    { "ids",           'p', "",     "teacher forcing: each line is a turn, ids to prefill | ids to decode",
      .runs = RUN_IDS },
    { "dump-logits",   'p', "",
      "with --ids: write the logits rows here (float32, V a row); - is standard output", .runs = RUN_IDS },
    { "trace",         'p', "",
      "with --ids, -p, --eval: write what every pass computes, and what the method decides, to this .safetensors",
      .runs = RUN_PROMPT | RUN_IDS | RUN_EVAL },
    { "trace-layers",  's', "",     "with --trace: only these layers, like 0,3 or 4:8:2 (from, to, step)",
      .runs = RUN_PROMPT | RUN_IDS | RUN_EVAL },
    { "batch",         'p', "",
      "answer the json lines of a file or - with json lines; prompt, messages or ids a line; exit code "
      "1: one had an error", .runs = RUN_BATCH | RUN_TOKENS },
    { "quiet",         'b', "0",    "errors only on stderr", .flag = "-q" },
    { "no-history",    'b', "0",
      "do not keep a chat's messages for the next one (~/.local/state/kvcomp/history)", .runs = RUN_CHAT },

    // Measure
    { "eval",          's', "",
      "quality through the compressed cache: tasks of data/tasks, files of dialogues, or ppl or kld of -f; "
      "comma-separated; all is needle,multiturn,coref,facts,json,fewshot,summary", .runs = RUN_EVAL,
      .part = "Measure" },
    { "eval-items",    'i', "0",
      "the first texts of each task or file, in all their versions, 0: all; ppl, kld: most windows of the text, 0: 8",
      0, 1 << 20, .runs = RUN_EVAL | RUN_REPORT },
    { "eval-length",   'i', "512",  "ppl, kld: tokens of a window, half prefilled, half decoded", 4, 1 << 20,
      .runs = RUN_EVAL },
    { "eval-out",      'p', "",
      "write a line per item and row to this file as it goes; the same run with the same file goes on where "
      "it stopped", .runs = RUN_EVAL },
    { "eval-shard",    's', "1/1",  "I/N: every N-th item from the I-th on, to spread a run over machines",
      .runs = RUN_EVAL | RUN_REPORT },
    { "eval-merge",    'p', "",     "FILES of --eval-out, all parts of one run: print their one table and leave" },
    { "compare",       's', "",
      "methods, comma-separated: the same items through each (--eval all unless given); score_gap is from "
      "the first", .runs = RUN_EVAL },
    { "budgets",       's', "",     "budgets for --compare, comma-separated", .runs = RUN_EVAL | RUN_REPORT },
    { "report",        'p', "",
      "write a page: quality against bytes, what each method keeps, a picture a paper; scores of --eval, "
      "else of needles", .runs = RUN_EVAL | RUN_REPORT },
    { "bench",         'b', "0",    "measure speed; with --synthetic or a model" },
    { "bench-depths",  's', "0,4096,16384,32768", "decode at these context lengths", .runs = RUN_BENCH },
    { "bench-prompts", 's', "512,4096", "prefill of these lengths", .runs = RUN_BENCH },
    { "repeat",        'i', "5",    "runs per number of --bench, the median counts", 1, 1000,
      .runs = RUN_BENCH, .flag = "-r" },

    // Other
    { "list-methods",  'b', "0",    "the methods, one name a line", .part = "Other" },
    { "version",       'b', "0",    "print the version" },
    { NULL, 0, NULL, NULL },
};

// Every option of the program and of every method, at its default.
Options *options_of_program(void) {
    Options *o = options_new();
    options_add(o, program_options);
    EACH_METHOD(m) options_add(o, (*m)->opts);
    return o;
}

// ---- suggestions for misspelt options
// A name that is none is taken for a slip of the finger where it is near to one of ours (farthest_misspelling in
// lib/base.h).

// Takes into *best the option that is nearer to name than *distance.
static void nearer_option(const char *name, const char **best, int *distance) {
    for (const Opt *o = program_options; o->name; o++) nearer_name(name, o->name, best, distance);
    EACH_METHOD(m)
        for (const Opt *o = (*m)->opts; o && o->name; o++) nearer_name(name, o->name, best, distance);
}

// ---- options that are none: what to use instead
// What other programs call an option of ours; and options that are gone: a script of last year's ends with 2 and one
// line that says how to write it now. Variants of methods that nobody but an experiment asked for, and that have
// nothing in their place, are refused as any other word is. A line here may go when nobody can have the option in a
// script any more.
static const struct { const char *name, *instead; } no_options[] = {
    { "temperature",              "--temp" },
    { "system-prompt",            "--system" },
    { "prompt-file",              "-f" },
    { "predict",                  "-n" },
    { "max-tokens",               "-n" },
    { "max-new-tokens",           "-n" },
    { "ctx",                      "--ctx-size" },
    { "ngl",                      "-d cuda" },
    { "gpu-layers",               "-d cuda" },
    { "n-gpu-layers",             "-d cuda" },
    { "h2o",                      "h2o drops rows in every decode step, as its paper does" },
    { "keep",                     "each method says what it keeps: --help METHOD" },
    { "think",                    "a thinking model thinks, unless --no-think" },
    { "st",                       "-p TEXT is answered once; a chat ends where its input does" },
    { "single-turn",              "-p TEXT is answered once; a chat ends where its input does" },
    { "repeat-last-n",            "--temp, --top-k, --top-p and --min-p say how a token is drawn" },
    { "repeat-penalty",           "--temp, --top-k, --top-p and --min-p say how a token is drawn" },
    { "color",                    "NO_COLOR=1 in the environment is never, CLICOLOR_FORCE=1 always" },
    { "markdown",                 "a table that goes into a file or a pipe is Markdown" },
    { "eval-window",              "--eval-length: tokens of a window" },
    { "eval-windows",             "--eval-items: windows of the text" },
    { "eval-seed",                "models/tiny_tasks.py TASK --seed N writes other items, --eval FILE plays them" },
    { "compare-base",             "score_gap is measured from the first method of --compare" },
    { "eval-history",
      "replies before an answer that stands beside \"messages\" are given, others are the model's own" },
    { "eval-file",                "--eval FILE plays dialogues, --eval kld -f FILE a text" },
    { "no-stats",                 "-q" },
    { "verbose",                  "--help METHOD has the defaults, --inspect what a dialogue takes" },
    { "stats",                    "/stats in a chat; --json has the same numbers" },
    { "trace-steps",              "every step is written; -n N makes fewer, --trace-layers leaves layers out" },
    { "dialogue",                 "--dump-tokens --batch FILE prints the ids of its lines" },
    { "device-memory",            "--plan prints the sum" },
    { "wrap",
      "replies break between words on a terminal by themselves (| cat leaves lines as they come)" },
    { "loopserve-variant",        "--paper is variant a, the paper's bound" },
    { "loopserve-max-tiles",      "--loopserve-max-cells" },
    { "minference-ratio",         "--minference-verticals and --minference-slashes" },
    { "calibrate-haystack",       "-f" },
    { "calibrate-prompt",         "the chat template is the frame; --raw is the authors' prompt" },
    { "eval-prompts",             "LongBench is played by data/lm_eval_kvcomp.py" },
    { "bench-suite",              "run --bench once a method" },
    { "bench-file",               "run --bench -m DIR, and --inspect for its memory" },
    { "bench-kernels",            "profile --bench with nsys or ncu (data/gpu_slot.sh)" },
    { "dililazy-scores",          "--head-scores" },
    { "headkv-scores",            "--head-scores" },
    { "dililazy-beta",            "--head-beta" },
    { "headkv-beta",              "--head-beta" },
    { "sonic-oneshot",            "--paper" },
    { "sonic-untrained",          "--sonic-weights none" },
    { "pats-policy",              "--pats-tend N is the paper's static schedule" },
    { "lychee-beta",              "--paper takes the bound of Eq. 2 (1); without it a score is q.mu (0)" },
    { "lychee-chunks-per-cluster", "a cluster has 2 chunks on average, as in the paper" },
    { "lychee-gqa",               "the best query head of a group counts" },
    { "lychee-stats",             "--trace writes down what every step scores and reads" },
};

// Ends the program for an option that is none: exit 2. Behind the reason stands what to type instead,
// when the name is in that table, or near to one here.
void unknown_option(const char *reason, const char *name) {
    const char *best = NULL;
    for (size_t i = 0; i < sizeof no_options / sizeof *no_options; i++)
        if (!strcmp(name, no_options[i].name)) die(EXIT_USAGE, "%s: %s", reason, no_options[i].instead);

    // Methods had an option each, and one serves them now: --lychee-sink is --sink.
    int distance = 1;                                   // the same word
    for (const char *p = name; p; p = strchr(p + 1, '-')) nearer_option(p + (*p == '-'), &best, &distance);
    if (!best) distance = farthest_misspelling(name);
    nearer_option(name, &best, &distance);
    if (best) die(EXIT_USAGE, "%s (did you mean --%s?)", reason, best);
    die(EXIT_USAGE, "%s (kvcomp --help lists them)", reason);
}

// ---- options without effect
// An option that this run never looks at is a mistake of the user's, such as --budget without
// --method. It is not refused, because scripts share their options among runs; a line says so.

// The option that makes a run what it is, and how a line names it. The first of those that are given decides.
static const struct Run { int run; const char *name, *flag; } run_flags[] = {
    { RUN_MERGE,     "eval-merge",  "--eval-merge" },   { RUN_BENCH,   "bench",   "--bench" },
    { RUN_TOKENS,    "dump-tokens", "--dump-tokens" },  { RUN_PLAN,    "plan",    "--plan" },
    { RUN_INSPECT,   "inspect",     "--inspect" },      { RUN_CALIBRATE, "calibrate", "--calibrate" },
    { RUN_IDS,       "ids",         "--ids" },          { RUN_BATCH,   "batch",   "--batch" },
    { RUN_EVAL,      "eval",        "--eval" },         { RUN_EVAL,    "compare", "--eval" },
    { RUN_REPORT,    "report",      "--report" },       { RUN_DEMO,    "demo",    "--demo" },
    { RUN_PROMPT,    "file",        "-p or -f" },       { RUN_PROMPT,  "prompt",  "-p or -f" },
    { RUN_CHAT,      NULL,          "a chat" },
};

// What the run does.
static const struct Run *run_kind(const Options *o) {
    const struct Run *r = run_flags;
    while (r->name && !(opt_find(o, r->name)->kind == 'b' ? opt_int(o, r->name) : opt_given(o, r->name))) r++;
    return r;
}

// Does method m look at the option? The options of several methods stand in the program's table:
// those that its `uses` names, and how much to keep.
static int method_looks_at(const Method *m, const char *name) {
    char flag[80];
    if (opt_find_in(m->opts, name)) return 1;
    if (!strcmp(name, "budget") || !strcmp(name, "ratio"))
        return m->budget || m->evicts || m->role & ROLE_SELECT;
    snprintf(flag, sizeof flag, "--%.60s", name);
    const char *at = m->uses ? strstr(m->uses, flag) : NULL, *end = at ? at + strlen(flag) : "-";
    return !*end || strchr(" ,", *end);
}

// Is the option one that only some methods look at?
int is_of_methods(const char *name) {
    if (!strncmp(name, "calibrate", 9)) return 0;
    EACH_METHOD(m) {
        if (method_looks_at(*m, name)) return 1;
    }
    return 0;
}

// Does any method of a list like "full,loopserve-p+lychee" look at the option? A name that is none
// will be refused by its own message, and counts as one that does.
static int methods_look_at(const char *list, const char *name) {
    char part[160];
    while (next_word(&list, ",+", part, sizeof part)) {
        const Method *m = method_find(part, strlen(part));
        if (!m || method_looks_at(m, name)) return 1;
    }
    return 0;
}

// Appends " --name" to the text, if there is room.
static void flag_add(char text[512], const char *name) {
    size_t n = strlen(text);
    if (n + strlen(name) + 5 < 512) snprintf(text + n, 512 - n, "%s--%s", n ? ", " : "", name);
}

// Has the option an effect in this run, as far as the kind of run goes?
static int run_looks_at(const char *name, int run) {
    const Opt *o = opt_find_in(program_options, name);
    if (!strncmp(name, "calibrate", 9)) return run == RUN_CALIBRATE;
    return !o || !o->runs || o->runs & run;
}

// Says in one line which of the given options this run never looks at, and in another one which the
// methods do not. Greedy sampling is what an evaluation does anyway, so --temp 0 there is no mistake. The report, the
// demonstration and the lines of a batch name their own methods.
void say_without_effect(const Options *o) {
    char run_text[512] = "", method_text[512] = "";
    const char *methods = *opt_str(o, "compare") ? opt_str(o, "compare") : opt_str(o, "method");
    const struct Run *r = run_kind(o);
    int own_choice = *opt_str(o, "report") || r->run & (RUN_DEMO | RUN_BATCH);
    for (int i = 0; i < (int)shlen(o->given); i++) {
        const char *name = o->given[i].key;
        if (!run_looks_at(name, r->run)) {
            if (strcmp(name, "temp") || opt_real(o, name) > 0) flag_add(run_text, name);
        } else if (r->run & RUN_SESSION && !own_choice && is_of_methods(name) && !methods_look_at(methods, name)) {
            flag_add(method_text, name);
        }
    }

    if (*run_text) warn("without effect in %s: %s", r->flag, run_text);
    const char *flag = *opt_str(o, "compare") ? "--compare " : "--method=";
    if (*method_text) warn("without effect with %s%s: %s", flag, methods, method_text);
    if (opt_given(o, "bf16-terms") && !terms_matter(opt_int(o, "bf16-terms")))
        warn("without effect with %s: --bf16-terms %s", simd_name(), opt_str(o, "bf16-terms"));
}

// Is the run an evaluation?
int evaluates(const Options *o) {
    return *opt_str(o, "eval") || *opt_str(o, "compare");
}
