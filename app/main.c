// app/main.c - the command line.
#define _GNU_SOURCE
#include "page.h"
#include <errno.h>
#include <limits.h>
#include <stdlib.h>

// main at the end of this file does what the command line asks for. Reading order, from there:
//
//     run_program    help, the options, their checks
//     run_options    what needs no model: --eval-merge; what opens its own: --bench
//     run_app        opens config, tokenizer, template, weights, device and session, each when it is needed
//     run_mode       the one thing that is asked for: --ids, --batch, --eval, --report, --demo, -p, or a chat
//
// Everything that can be refused is refused before anything slow begins. stdout has the asked-for result alone.

// ---- --plan: what a dialogue takes
// --plan: what a dialogue of -c tokens takes at most: on the CPU in sums, on a GPU every allocation, by memory. The
// weights are shapes, and a session on the CPU is asked, which has opened its parts and holds no rows. Returns 0.
static int plan(App *a) {
    char err[512];
    if (*opt_str(a->o, "synthetic")) a->c->dtype = DT_BF16;
    a->w = weights_planned(a->c);
    options_set(a->o, "device", "cpu", err);
    Session *s = a->s = session_open(a->c, a->w, a->o, opt_str(a->o, "method"));
    MemoryPlan p = memory_plan(s);
    printf("-c %d, method %s, K %s, V %s: ", p.ctx, opt_str(a->o, "method"), s->fk->name, s->fv->name);
    printf("weights %.3f GB + rows %.3f GB + ", (double)p.weights * 1e-9, (double)p.kv * 1e-9);
    printf("method %.3f GB + passes %.3f GB = ", (double)p.parts * 1e-9, (double)p.pass_cpu * 1e-9);
    printf("%.3f GB with -d cpu", (double)(p.weights + p.kv + p.parts + p.pass_cpu) * 1e-9);
    if (memory_free() >= 0) printf("; %.3f GB free here", 1e-9 * memory_free());
    printf("\n");
    if (a->c->as_q8) return 0;

    s->batch = batch_rows(a->o, "cuda");
    p = memory_plan(s);
    printf("with -d cuda and -b %d at most\n", s->batch);
    size_t sum = DEVICE_OWN;
    for (int i = 0; i < p.n_line; i++) {
        printf("  %-58s %10.3f GB\n", p.line[i].what, (double)p.line[i].bytes * 1e-9);
        sum += p.line[i].bytes;
    }
    printf("  %-58s %10.3f GB\n", "CUDA's own", (double)DEVICE_OWN * 1e-9);
    printf("  %-58s %10.3f GB\n", "all", (double)sum * 1e-9);
    return 0;
}

// ==================================================================================================== COMMAND LINE
// Options are read, then checked against each other. What they name is opened, the rest of the program runs,
// everything is closed.

// The option's name that a flag of the command line stands for: "-m" and "--model" are both
// "model". NULL: none.
static const char *long_of(const char *flag) {
    for (const Opt *o = program_options; o->name; o++)
        if (o->flag && !strcmp(o->flag, flag)) return o->name;
    return flag[1] == '-' ? flag + 2 : NULL;
}

// ---- help
// All of it is made from the tables of options and methods, so none of it can be out of date. --help shows one screen
// of what is often needed, --help all every option, --help METHOD what one method is and takes.

enum { HELP_COLUMNS = 100 };

// An entry of help: flag, name, value, what it is for, and the default where there is one. brief 1: of what it is
// for only what stands before the first "; " or " (".
static void help_option(const Opt *o, int brief) {
    static const char *const value[] = { ['b'] = "", ['i'] = " N", ['f'] = " F", ['s'] = " TEXT", ['p'] = " FILE",
                                         ['c'] = "=" };         // behind it the words of the choice
    char left[128], text[640];
    const char *end = strstr(o->help, "; "), *bracket = strstr(o->help, " ("), *flag = o->flag ? o->flag : "";
    int n = (int)strlen(o->help), wide = brief ? 25 : 32;
    if (brief && end) n = min_int(n, (int)(end - o->help));
    if (brief && bracket) n = min_int(n, (int)(bracket - o->help));
    snprintf(left, sizeof left, "%s%s--%s%s%s", flag, *flag ? " " : "", o->name, value[(int)o->kind],
             o->kind == 'c' ? o->def : "");
    int shown = o->kind != 'b' && o->kind != 'c' && *o->def;
    snprintf(text, sizeof text, "%.*s%s%s%s", n, o->help, shown ? " [" : "", shown ? o->def : "", shown ? "]" : "");
    printf("  %-*s ", wide, left);
    if ((int)strlen(left) > wide) printf("\n%*s", wide + 3, "");
    print_wrapped(stdout, text, wide + 3, HELP_COLUMNS);
}

// The first lines.
static void help_head(void) {
    printf("kvcomp %s: chat with a Llama-style model under KV-cache compression\nusage: kvcomp [options] [DIR]\n",
           KVCOMP_VERSION);
}

// --help: one screen.
static void help(void) {
    static const char *const often[] = {
        "model", "device", "threads", "ctx-size", "prompt", "file", "system", "n-predict", "session", "demo",
        "temp", "seed", "method", "budget", "ratio", "eval", "compare", "budgets", "report", "bench",
        "batch", "json", "list-methods",
    };
    help_head();
    for (size_t i = 0; i < sizeof often / sizeof *often; i++)
        help_option(opt_find_in(program_options, often[i]), 1);
    printf("--help all has the other options, --help METHOD a method's.\n"
           "  kvcomp                                           chat with the shipped model; /help there\n"
           "  kvcomp -m DIR --method streaming --budget 512    a long chat in constant memory\n"
           "  kvcomp -m DIR -f long.txt --temp 0 -n 64 --json  one reply, and its numbers\n"
           "  kvcomp --eval needle --compare full,snapkv,lychee --budgets 64,128\n"
           "  kvcomp --report page.html                        what each method keeps, as a page\n");
}

// --help all
static void help_all(void) {
    help_head();
    for (const Opt *o = program_options; o->name; o++) {
        if (o->part) printf("%s\n", o->part);
        help_option(o, 0);
    }
    printf("Methods (--help METHOD has the paper, what is kept, limits)\n");
    EACH_METHOD(m)
        for (const Opt *o = (*m)->opts; o && o->name; o++) {
            const Method *const *first = methods;               // methods share options: the first one has it
            while (!opt_find_in((*first)->opts, o->name)) first++;
            if (first == m) help_option(o, 0);
        }
}

// What a method saves, as a sentence.
static const char *help_saves(const Method *m) {
    if (m->evicts) return "Memory is really given back.";
    if (m->role & ROLE_STORE) return "Rows take fewer bytes.";
    if (m->role & ROLE_SELECT) return "Saves reads, not memory: every row stays stored.";
    if (m->role) return "Saves prefill work, not memory.";
    return "Saves nothing: the reference.";
}

// --help METHOD, --help all
static void help_method(const char *name) {
    if (!strcmp(name, "all")) {
        help_all();
        return;
    }
    const Method *m = method_find(name, strlen(name));
    const char *near = m ? NULL : nearest_method(name, strlen(name));
    if (near) die(EXIT_USAGE, "--help: no method is called '%s' (did you mean %s? see --list-methods)", name, near);
    if (!m) die(EXIT_USAGE, "--help: no method is called '%s' (see --list-methods)", name);
    printf("%s: %s\n  %s\n", m->name, m->paper ? m->paper : "", m->keeps);
    printf("  %s\n", help_saves(m));
    if (m->limits) printf("  %s\n", m->limits);
    if (m->budget)
        printf("Uses --budget %d%s%s; or --ratio instead of --budget\n",
               m->budget, m->uses ? ", " : "", m->uses ? m->uses : "");
    else if (m->uses) printf("Uses %s\n", m->uses);
    if (m->opts) printf("Options (with their defaults)\n");
    for (const Opt *o = m->opts; o && o->name; o++) help_option(o, 0);
}

// Prints help if any argument asks for it, whatever the others are. 1: it did.
static int help_wanted(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *next = i + 1 < argc && argv[i + 1][0] != '-' ? argv[i + 1] : NULL;
        int plain = !strcmp(argv[i], "-h") || !strcmp(argv[i], "--help");
        if (!plain && strncmp(argv[i], "--help=", 7)) continue;
        if (!plain) help_method(argv[i] + 7);
        else if (next) help_method(next);
        else help();
        return 1;
    }
    return 0;
}

// ---- parsing: --x=v, --x v, flags without a value, short names, one positional folder
// A value is checked when it is set (options_set); what does not go together is checked when all are known
// (check_options). A mistake is exit 2, with one line that says what to type instead where that can be guessed.

// Sets one option; exit 2 with the reason, and with a suggestion where there is one.
static void parse_one(Options *o, const char *name, const char *value) {
    char err[256];
    if (!options_set(o, name, value, err)) return;
    if (!opt_find(o, name)) unknown_option(err, name);
    int warm = !strcmp(name, "threads") && strchr(value, '.');              // -t 0.7 means --temp
    die(EXIT_USAGE, "%s%s", err, warm ? " (did you mean --temp?)" : "");
}

// A file behind that of --eval-merge is one more: a line of the option's value each.
static void parse_file(Options *o, const char *path) {
    char *list = NULL;
    put_part(&list, "\n", opt_str(o, "eval-merge"));
    put_part(&list, "\n", path);
    arrput(list, 0);
    parse_one(o, "eval-merge", list);
    arrfree(list);
}

// The option that begins at argv[i], or a folder, which is the model. Returns how many arguments it takes: 1, or 2
// with its value behind it.
static int parse_arg(Options *o, int argc, char **argv, int i) {
    char flag[64], unknown[96], *arg = argv[i], *eq = strchr(arg, '=');
    const char *value = eq ? eq + 1 : NULL;
    if (arg[0] != '-' || !arg[1]) {
        if (*opt_str(o, "eval-merge")) parse_file(o, arg);
        else if (!opt_given(o, "model")) parse_one(o, "model", arg);
        else die(EXIT_USAGE, "two models on the command line: '%.60s' and '%.60s'; give one (-p TEXT asks one question)",
                 opt_str(o, "model"), arg);         // often a blank in a path
        return 1;
    }
    snprintf(flag, sizeof flag, "%.*s", eq ? (int)(eq - arg) : 63, arg);
    const char *name = long_of(flag);
    snprintf(unknown, sizeof unknown, "unknown option %s", flag);
    if (!name) unknown_option(unknown, flag + 1);
    const Opt *known = opt_find(o, name);
    int takes = value || !known || known->kind == 'b' ? 1 : 2;
    if (i + takes > argc) die(EXIT_USAGE, "--%s wants a value", name);
    if (!value) value = takes == 1 ? "1" : argv[i + 1];
    parse_one(o, name, value);
    return takes;
}

// Options that do not go together: exit 2. One that this run never looks at is only said (say_without_effect).
static void check_options(const Options *o) {
    int text = opt_given(o, "prompt") || (*opt_str(o, "file") && !*opt_str(o, "eval")), first, step;
    const struct { int wrong; const char *why; } rules[] = {
        { opt_given(o, "budget") && opt_given(o, "ratio"), "--budget and --ratio both say how much to keep; give one" },
        { opt_given(o, "prompt") && opt_given(o, "file"), "-p and -f both say what to answer; give one" },
        { *opt_str(o, "trace") && !text && !*opt_str(o, "ids") && !evaluates(o),
          "--trace goes with --ids, -p, -f or --eval" },
        { opt_int(o, "json") && opt_int(o, "csv"), "--json and --csv both say how to print; give one" },
        { opt_int(o, "json") && !strcmp(opt_str(o, "dump-logits"), "-"),
          "--dump-logits - and --json both write to standard output; give a file" },
        { opt_int(o, "json-rows") && !opt_int(o, "json"), "--json-rows goes with --json" },
        { *opt_str(o, "trace-layers") && !*opt_str(o, "trace"), "--trace-layers goes with --trace FILE" },
        { *opt_str(o, "compare") && text, "--compare goes with --eval (all unless given), not with -p or -f; in a chat, "
          "/compare QUESTION asks several methods" },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].wrong) die(EXIT_USAGE, "%s", rules[i].why);
    if (shard_parse(opt_str(o, "eval-shard"), &first, &step))
        die(EXIT_USAGE, "--eval-shard wants I/N with I from 1 to N, found '%.40s'", opt_str(o, "eval-shard"));
}

// ---- what is asked beside the model's text
// Prints ids on one line and frees them.
static void print_ids(int *ids) {
    for (int i = 0; i < (int)arrlen(ids); i++) printf("%s%d", i ? " " : "", ids[i]);
    printf("\n");
    arrfree(ids);
}

// The messages of a list, the last of which the user's has to be (stb_ds). NULL and err: the template takes no such
// dialogue.
static Message *messages_asked(const App *a, const Json *list, char err[512]) {
    Message *m = messages_of_json(list, err);
    int bad = 0;
    if (m && strcmp(arrlast(m).role, "user")) bad = fault(err, "the last message is not the user's");
    if (m && !strcmp(m->role, "system") && a->tp->no_system)
        bad = fault(err, "this chat template has no system message (%.300s)", a->tp->no_system);
    if (bad) arrfree(m);
    return m;
}

// ---- many requests, one process (--batch)
// A line of --batch FILE, or of standard input, is a request, and it gets one line of stdout as soon as
// it is played, so that a program can hold one kvcomp and talk to it through two pipes. A request:
//   what is asked       "prompt": TEXT, or "messages": [{"role":..,"content":..},..], or "ids": [..]
//   a reply is made     "max_tokens": N, "stop": TEXT or [TEXT,..]
//   or it is given      "continuation": TEXT or [id,..]; its log-probabilities are the answer
//   how                 "method": SPEC, "budget": N, and other options of methods, sampler and template
//   whose it is         "id": TEXT or N, which comes back
// Every request has a session of its own. Messages are played turn by turn, as a chat would have gone. Replies are
// greedy unless `temp` is given. A line that is none of this gets {"error":..,"line":N}, and the next one is read
// (D87).

// The fields of a request that are no options.
static const char request_fields[] = "id|prompt|messages|ids|continuation|max_tokens|stop|method";

// Sets the option called name to a value of JSON. 0, or -1 with err.
static int request_option(Options *o, const char *name, const Json *v, char err[512]) {
    char number[40], why[256];
    const char *text = number;
    if (v->type == JSON_STRING) text = v->str;
    else if (v->type == JSON_BOOL || (v->type == JSON_NUMBER && v->is_int))
        snprintf(number, sizeof number, "%lld", (long long)v->i);
    else if (v->type == JSON_NUMBER) snprintf(number, sizeof number, "%.17g", v->num);
    else return fault(err, "'%.40s' is neither a number nor a text", name);
    if (options_set(o, name, text, why)) return fault(err, "%s", why);
    return 0;
}

// Sets the options of a request, whose names may be written with _ for -: those of the methods, and those of what is
// asked and said. Who asks may not name files: the error about one that does not fit tells what is in it. 0, or -1 with
// err.
static int request_options(Options *o, const Json *j, char err[512]) {
    static const char asked[] = "ctk|ctv|raw|system|parse-special|no-think|ignore-eos|temp|top-k|top-p|min-p|seed";
    char why[256];
    int n;
    if (json_get(j, "budget") && json_get(j, "ratio"))
        return fault(err, "'budget' and 'ratio' both say how much to keep");

    if (json_get(j, "budget")) (void)shdel(o->given, "ratio");          // the command line's
    if (json_get(j, "ratio")) options_set(o, "budget", "0", why);
    for (int i = 0; i < j->n; i++) {
        char name[64];
        if (word_place(request_fields, j->key[i]) >= 0) continue;
        snprintf(name, sizeof name, "%s", j->key[i]);
        for (char *p = name; *p; p++)
            if (*p == '_') *p = '-';
        const Opt *known = opt_find(o, name);
        if (known && known->kind == 'p')
            return fault(err, "'%.40s' names a file: give --%s on the command line", j->key[i], name);
        if (word_place(asked, name) < 0 && !(known && is_of_methods(name)))
            return fault(err, "unknown field '%.40s'", j->key[i]);
        if (request_option(o, name, &j->item[i], err)) return -1;
    }

    if (!json_get(j, "max_tokens")) return 0;
    if (read_whole(j, "max_tokens", 0, INT_MAX, &n, err)) return -1;
    return request_option(o, "n-predict", json_get(j, "max_tokens"), err);
}

// Appends the ids of a list, which may not be empty, to *ids (stb_ds). 0, or -1 with err.
static int request_ids(const Config *c, const Json *list, const char *key, int **ids, char err[512]) {
    char why[512];
    if (ids_of_json(list, c->V, ids, why)) return fault(err, "'%s': %.300s", key, why);
    return arrlen(*ids) ? 0 : fault(err, "'%s' is empty", key);
}

// Takes the texts that end the reply. 0, or -1 with err.
static int request_stops(App *a, const Json *stop, char err[512]) {
    int several = json_is(stop, JSON_ARRAY), n = several ? stop->n : !json_none(stop);
    for (const Json *text = several ? stop->item : stop; n--; text++) {
        if (!json_is(text, JSON_STRING) || !text->len) return fault(err, "'stop' is no text, or holds an empty one");
        arrput(a->stop, text->str);
    }
    return 0;
}

// Appends a turn to the record: what the user said is prefilled, what the assistant said (NULL: it is asked for) is
// decoded. 0, or -1 with err.
static int request_turn(App *a, const char *text, const char *reply, char err[512]) {
    Turn t = render_turn(a, text, err);
    if (reply) t.dec = tokenizer_encode(a->tok, reply, strlen(reply), 0, NULL);
    record_take_back(a, &t);
    arrput(a->turn, t);
    return *err ? -1 : 0;
}

// The turns of a dialogue, whose last message is the user's. 0, or -1 with err.
static int request_messages(App *a, const Json *list, char err[512]) {
    char why[256];
    if (!a->tp) return fault(err, "'messages' want a chat template");
    Message *m = messages_asked(a, list, err);
    int n = (int)arrlen(m), bad = !m, from = m && !strcmp(m->role, "system");
    if (from) options_set(a->o, "system", m->content, why);
    for (int i = from; i < n && !bad; i += 2)
        bad = request_turn(a, m[i].content, i + 1 < n ? m[i + 1].content : NULL, err);
    arrfree(m);
    return bad;
}

// A prompt as one turn. An empty one is the token that begins a text, BOS or else EOS, so that the
// probability of a whole text can be asked for. 0, or -1 with err.
static int request_prompt(App *a, const Json *prompt, char err[512]) {
    int first = tokenizer_bos(a->tok) >= 0 ? tokenizer_bos(a->tok) : tokenizer_eos(a->tok);
    if (prompt->type != JSON_STRING) return fault(err, "'prompt' is no text");
    if (request_turn(a, prompt->str, NULL, err)) return -1;
    Turn *t = &arrlast(a->turn);
    if (!arrlen(t->pre) && first >= 0) arrput(t->pre, first);
    return arrlen(t->pre) ? 0 : fault(err, "'prompt' has no token");
}

// Appends the ids of the continuation to *ids (stb_ds). Behind a plain text they are those that the two texts together
// have more than the prompt alone, because a tokenizer may join what stands on both sides of the border (as
// lm-evaluation-harness has it); behind a template's turn, or ids, the text is encoded by itself. 0, or -1 with err.
static int request_continuation(const App *a, const Json *prompt, const Json *given, int **ids, char err[512]) {
    if (given->type == JSON_ARRAY) return request_ids(a->c, given, "continuation", ids, err);
    if (given->type != JSON_STRING) return fault(err, "'continuation' is neither a text nor a list of ids");

    char *text = NULL;
    int special = opt_int(a->o, "parse-special");
    if (prompt && !a->tp) bytes_put(&text, prompt->str, prompt->len);
    int *alone = tokenizer_encode(a->tok, text ? text : "", arrlenu(text), special, NULL), before = (int)arrlen(alone);
    bytes_put(&text, given->str, given->len);
    int *all = tokenizer_encode(a->tok, text, arrlenu(text), before && special, NULL);
    if (arrlen(all) > before) *ids = ids_append(*ids, all + before, (int)arrlen(all) - before);
    arrfree(alone);
    arrfree(all);
    arrfree(text);
    return arrlen(*ids) ? 0 : fault(err, "'continuation' adds no token");
}

// Reads what is asked into the record, and the continuation into *ids. 0, or -1 with err.
static int request_read(App *a, const Json *j, int **ids, char err[512]) {
    const Json *prompt = json_get(j, "prompt"), *messages = json_get(j, "messages"), *asked = json_get(j, "ids");
    const Json *given = json_get(j, "continuation");
    if (!!prompt + !!messages + !!asked != 1) return fault(err, "expected one of 'prompt', 'messages' and 'ids'");
    if (given && (json_get(j, "max_tokens") || json_get(j, "stop")))
        return fault(err, "'continuation' is a given reply: 'max_tokens' and 'stop' are for one that is made");
    if (prompt && request_prompt(a, prompt, err)) return -1;
    if (messages && request_messages(a, messages, err)) return -1;
    if (asked) {
        arrput(a->turn, (Turn){ 0 });
        if (request_ids(a->c, asked, "ids", &arrlast(a->turn).pre, err)) return -1;
    }
    return given ? request_continuation(a, prompt, given, ids, err) : request_stops(a, json_get(j, "stop"), err);
}

// Makes the reply, and writes it as far as a stop text.
static void request_reply(App *a, FILE *f) {
    char *text = NULL;
    size_t size;
    int most = opt_int(a->o, "n-predict");
    FILE *out = memory_stream(&text, &size);
    generate(a, most < 0 ? 256 : most, out);
    memory_stream_close(out);
    int end = stop_place(a->stop, text, size);
    fputs("\"text\":", f);
    json_escape(f, text, end < 0 ? size : (size_t)end);
    fputc(',', f);
    write_ids(f, arrlast(a->turn).dec);
    json_print(f, ",'finish':%s,", a->finish);
    free(text);
}

// Scores the continuation, and writes its log-probabilities, their sum, and whether each id was the most probable
// one. 0, or -1 with err.
static int request_score(App *a, const int *given, FILE *f, char err[512]) {
    int n = (int)arrlen(given), greedy = 1;
    double sum = 0;
    write_ids(f, given);
    for (int i = 0; i < n; i++) {
        double logp = a->s->logits[given[i]] - log_sum_exp(a->s->logits, a->c->V);
        json_print(f, i ? ",%.17g" : ",'logprobs':[%.17g", logp);
        sum += logp;
        greedy &= argmax(a->s->logits, a->c->V) == given[i];
        if (i == n - 1) break;                          // nothing is asked behind the last one
        if (make_room(a, 1, 0, err)) return -1;
        decode(a->s, given[i]);
    }
    json_print(f, "],'logprob':%.17g,'greedy':", sum);
    fputs(greedy ? "true," : "false,", f);
    return 0;
}

// Feeds the record, then scores the continuation (NULL: there is none) or makes the reply. 0, or -1 with err.
static int request_play(App *a, const int *given, FILE *f, char err[512]) {
    for (int i = 0; i < (int)arrlen(a->turn); i++)
        if (ids_known(a->c, a->turn[i].pre, err) || ids_known(a->c, a->turn[i].dec, err)) return -1;
    if (ids_known(a->c, given, err) || replay(a, err)) return -1;
    if (given) return request_score(a, given, f, err);
    request_reply(a, f);
    return 0;
}

// Plays the request j with a session of its own, and writes the fields of its answer. 0, or -1 with err.
static int request_answer(App *base, const Json *j, FILE *f, char err[512]) {
    double t0 = now();
    char why[256];
    int *given = NULL;
    const Json *method = json_get(j, "method");
    App a = app_beside(base, options_copy(base->o));
    if (!opt_given(a.o, "temp")) options_set(a.o, "temp", "0", why);
    int bad = request_options(a.o, j, err);
    if (opt_int(a.o, "raw")) a.tp = NULL;
    if (opt_int(a.o, "seed") >= 0) a.rng = (uint64_t)opt_int(a.o, "seed");
    if (!bad && method && method->type != JSON_STRING) bad = fault(err, "'method' is no text");
    if (!bad && *opt_str(a.o, "system") && a.tp && a.tp->no_system)
        bad = fault(err, "this chat template has no system message");

    if (!bad) a.method = copy_text(method ? method->str : base->method);
    if (!bad) bad = !(a.s = session_try(a.c, a.w, a.o, a.method, err));
    if (!bad) bad = request_read(&a, j, &given, err) || request_play(&a, given, f, err);
    if (!bad) {
        json_print(f, "'method':%s,'budget':%d,", a.method, a.s->turn ? a.s->applied : budget_now(a.s));
        json_numbers(&a, f);
        json_print(f, "'seconds':%.6f,", now() - t0);
    }
    base->rng = a.rng;
    arrfree(given);
    arrfree(a.stop);
    app_beside_close(&a);
    return bad ? -1 : 0;
}

// Answers a line of n bytes in one line of f. 0, or -1 when the answer is an error.
static int batch_line(App *a, const char *line, size_t n, long number, FILE *f) {
    char err[512], *text = NULL;
    size_t size;
    FILE *answer = memory_stream(&text, &size);
    int bad = 0;
    Json *j = json_parse(line, n, err);
    const Json *id = json_get(j, "id");
    if (!j) bad = 1;
    else if (j->type != JSON_OBJECT) bad = fault(err, "is no object");
    else if (json_holds_nul(j)) bad = fault(err, "a text holds the character \\u0000");
    else if (id && id->type != JSON_STRING && !id->is_int)
        bad = fault(err, "'id' is neither a text nor a whole number");
    else bad = request_answer(a, j, answer, err);
    memory_stream_close(answer);

    fputc('{', f);
    if (json_is(id, JSON_STRING)) json_print(f, "'id':%s,", id->str);
    else if (id && id->is_int) fprintf(f, "\"id\":%lld,", (long long)id->i);
    if (bad) json_print(f, "'error':%s,", err);
    else fputs(text, f);
    json_print(f, "'line':%ld}\n", number);
    fflush(f);
    json_free(j);
    free(text);
    return bad ? -1 : 0;
}

// Prints the ids of a line of n bytes, {"messages": [..]}. 0, or -1 with err.
static int dump_dialogue(const App *a, const char *line, size_t n, char err[512]) {
    Json *j = json_parse(line, n, err);
    Message *m = j ? messages_asked(a, json_get(j, "messages"), err) : NULL;
    int *ids = m ? template_ids(a->tp, m, (int)arrlen(m), render_how(a), err) : NULL, bad = !ids;
    if (ids) print_ids(ids);
    arrfree(m);
    json_free(j);
    return bad ? -1 : 0;
}

// --batch: answers every line that is not blank. Returns 0, or 1 when a line had an error. With --dump-tokens the ids
// of each line are the answer, and an error ends it.
static int batch(App *a) {
    char err[512], *line = NULL;
    const char *path = opt_str(a->o, "batch");
    FILE *in = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    long requests = 0, failed = 0;
    if (!in) die(EXIT_USAGE, "--batch %s: %s", path, strerror(errno));
    for (long number = 1; read_line(in, &line); number++, arrsetlen(line, 0)) {
        size_t n = arrlenu(line);
        if (is_blank(line, line + n)) continue;
        requests++;
        if (!opt_int(a->o, "dump-tokens")) failed += batch_line(a, line, n, number, stdout) != 0;
        else if (dump_dialogue(a, line, n, err)) die(EXIT_USAGE, "--batch %s, line %ld: %s", path, number, err);
    }

    if (ferror(in)) die(EXIT_RUN, "--batch %s: %s", path, strerror(errno));
    if (in != stdin) fclose(in);
    if (failed && !quiet) warn("--batch: %ld of %ld requests had an error", failed, requests);
    arrfree(line);
    return failed ? EXIT_RUN : 0;
}

// --dump-tokens: the ids of the prompt on one line, or those of the dialogues of a file, one line each. Needs a
// tokenizer, but no weights.
static int dump_tokens(App *a, const char *text) {
    const char *dialogue = opt_str(a->o, "batch");
    if (!text && !*dialogue) die(EXIT_USAGE, "--dump-tokens wants -p TEXT, -f FILE or --batch FILE");
    if (text && *dialogue) die(EXIT_USAGE, "--dump-tokens --batch does not go with -p or -f");
    if (*dialogue && opt_int(a->o, "raw")) die(EXIT_USAGE, "--dump-tokens --batch does not go with --raw");
    if (!*opt_str(a->o, "model") && !*opt_str(a->o, "tokenizer")) default_model(a->o);
    char err[256];
    if (!*dialogue) options_set(a->o, "raw", "1", err);     // text alone wants no template
    open_tokenizer(a, 1);
    if (*dialogue) return batch(a);
    print_ids(tokenizer_encode(a->tok, text, strlen(text), opt_int(a->o, "parse-special"), NULL));
    return 0;
}

// ---- running
// Each mode is a function that takes the App with everything open and returns the exit code.

// The text of -p or -f, malloc'd. NULL: neither is given.
static char *prompt_text(const App *a) {
    char err[256];
    size_t n;
    const char *file = opt_str(a->o, "file");
    if (opt_given(a->o, "prompt")) return copy_text(opt_str(a->o, "prompt"));
    if (!*file || evaluates(a->o) || *opt_str(a->o, "calibrate")) return NULL;
    char *text = read_plain_text(strcmp(file, "-") ? file : "/dev/stdin", &n, err);
    if (!text) die(EXIT_USAGE, "-f %s", err);
    return text;
}

// -p, -f: one reply, of at most 256 tokens unless -n says otherwise. With --json the text itself is
// not printed: the object has it under "text".
static int answer_prompt(App *a, const char *text) {
    char err[256];
    session_begin(a);
    if (opt_int(a->o, "n-predict") < 0) options_set(a->o, "n-predict", "256", err);
    int had = (int)arrlen(a->turn), json = opt_int(a->o, "json");
    if (!had && !*text) die(EXIT_USAGE, "the prompt is empty");
    if (chat_turn(a, text, json ? NULL : stdout)) return EXIT_RUN;
    if (json) {
        char *reply = (int)arrlen(a->turn) > had ? reply_text(a, &arrlast(a->turn)) : copy_text("");
        print_json(a, reply);
        free(reply);
    }
    session_end(a);
    return 0;
}

// The modes that need a session. text: the prompt, or NULL.
static int run_mode(App *a, const char *text) {
    if (*opt_str(a->o, "ids")) return run_ids(a);
    if (*opt_str(a->o, "batch")) return batch(a);
    if (evaluates(a->o)) return evaluate(a, report_write);
    if (*opt_str(a->o, "report")) return report(a);
    if (opt_int(a->o, "demo")) {
        demo(a, "");
        return 0;
    }
    if (text) return answer_prompt(a, text);
    return chat(a);
}

// Opens what the mode needs, step by step, and runs it. Returns the exit code.
static int run_app(App *a, const char *text) {
    Options *o = a->o;
    if (opt_int(o, "dump-tokens") && !quiet) say_without_effect(o);
    if (opt_int(o, "dump-tokens")) return dump_tokens(a, text);
    // Tokenizer and template before the weights: reading those may take minutes.
    open_config(a);
    if (opt_int(o, "plan")) return plan(a);
    if (!opt_int(o, "inspect")) open_tokenizer(a, !*opt_str(o, "ids"));
    open_weights(a);
    if (opt_int(o, "inspect")) {
        inspect(a->c, a->w, stdout);
        return 0;
    }
    choose_device(a);
    if (*opt_str(o, "calibrate")) return calibrate(a->c, a->w, a->tok, a->tp, o);
    open_session(a);
    trace_open(a);
    int rc = run_mode(a, text);
    trace_close(a, rc == 0);
    return rc;
}

// Everything behind the options that only print something.
static int run_options(App *a) {
    char err[512];
    Saving page = { 0 };
    Options *o = a->o;
    if (*opt_str(o, "eval-merge")) {
        if (!quiet) say_without_effect(o);
        return eval_merge(a);
    }
#ifndef KVCOMP_CUDA
    if (!strcmp(opt_str(o, "device"), "cuda"))
        die(EXIT_RUN, "-d cuda: this kvcomp was built without CUDA (nvcc was not found); -d cpu works");
#endif
    find_model(o);
    if (opt_int(o, "bench")) return bench(o);
    if (*opt_str(o, "report") && save_begin(&page, opt_str(o, "report"), err))  // before hours of evaluation
        die(EXIT_RUN, "--report %s", err);
    save_drop(&page);
    char *text = prompt_text(a);
    int rc = run_app(a, text);
    free(text);
    return rc;
}

// The program, without the last look at its output. Returns the exit code.
static int run_program(int argc, char **argv) {
    if (help_wanted(argc, argv)) return 0;
    App a = { .o = options_of_program() };
    int rc = 0;
    arg_count = argc;
    args = argv;
    for (int i = 1; i < argc; ) i += parse_arg(a.o, argc, argv, i);
    check_options(a.o);
    quiet = opt_int(a.o, "quiet");
    const char *colors = getenv("CLICOLOR_FORCE");
    color_mode = colors && *colors && strcmp(colors, "0") ? COLOR_ALWAYS : COLOR_AUTO;
    bf16_terms = opt_int(a.o, "bf16-terms");
    progress_hook = progress;
    if (opt_int(a.o, "version")) {
        printf("kvcomp %s\n", KVCOMP_VERSION);
    } else if (opt_int(a.o, "list-methods")) {
        EACH_METHOD(m) printf("%-22s %s\n", (*m)->name, (*m)->keeps);
    } else {
        rc = run_options(&a);
    }
    app_close(&a);
    return rc;
}

// main, for whoever includes this file. Output that could not be written (a full disk) makes a
// failure of success.
int kvcomp_main(int argc, char **argv) {
    watch_signals();
    int rc = run_program(argc, argv);
    int lost = fflush(stdout) || ferror(stdout);
    if (lost && !rc) die(EXIT_RUN, "stdout: not everything could be written (%s)", strerror(errno));
    return rc;
}

#ifndef KVCOMP_NO_MAIN
int main(int argc, char **argv) { return kvcomp_main(argc, argv); }
#endif
