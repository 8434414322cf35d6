// app/measure.c - what a method costs and saves: evaluation, calibration, benchmark.
#define _GNU_SOURCE
#include "measure.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

// ==================================================================================================== EVALUATION
// What a method costs in quality, measured through its own compressed cache. There are two kinds of
// measurement:
//   Dialogues   --eval TASK,FILE,.. plays the dialogues of files with greedy decoding: of data/tasks by
//               their names (models/tiny_tasks.py makes those of the shipped model), or any by its path.
//   Plain text  --eval ppl and kld cut a text into windows. Half a window is prefilled as one turn,
//               the other half is decoded token by token. The probability of every next token is
//               compared with the text (ppl), and with full attention over the same tokens (kld).
// --compare plays the same items through several methods and --budgets, one row each, so that the
// differences between rows are paired.
//
// Every dialogue is played twice, from the first answer on; what stands before it is the same in both passes.
//   Free pass    The method answers, and its own answers are the history of the next turn; replies of a
//                file that are given are fed as they are. Scores, bytes and seconds come from this pass.
//   Forced pass  The right replies are fed token by token, to the method and to full attention
//                alike. NLL, KLD and top-1 agreement come from this pass, over the tokens of scored
//                replies, so these numbers do not depend on what a method happened to say.
//
// Reading order: what an item is, items from files, how an item is played, metrics, scores and
// intervals, tables, the modes, answers on disk.

// ---- what an item is
// An item is a dialogue with its right answers: a list of turns, some of which are scored.

// The scores by which a reply can be judged, and their names in a file of dialogues.
enum {
    METRIC_F1,                  // F1 of the two bags of words
    METRIC_CLASS,               // accuracy among the labels of the turn
    METRIC_ROUGE,               // Rouge-L over words in their order
    METRIC_FOUND,               // 1 if the reply holds the answer
    METRIC_EXACT,               // 1 if the reply is the answer
    METRICS
};
static const char eval_metrics[] = "f1|choice|rouge|found|exact";

// Frees the turns of an item; its texts belong to the run.
static void item_free(EvalItem *it) {
    for (int j = 0; j < (int)arrlen(it->turn); j++) arrfree(it->turn[j].span);
    arrfree(it->turn);
}

// The number of scored turns of an item.
static int scored_turns(const EvalItem *it) {
    int n = 0;
    for (int j = 0; j < (int)arrlen(it->turn); j++) n += it->turn[j].answers != NULL;
    return n;
}

// Appends a part to a text (stb_ds of bytes), behind a separator unless it is the first.
void put_part(char **text, const char *sep, const char *part) {
    if (arrlen(*text)) bytes_put(text, sep, strlen(sep));
    bytes_put(text, part, strlen(part));
}

// The index of w among the words (stb_ds), or -1.
static int word_in(char **words, const char *w) {
    for (int i = 0; i < (int)arrlen(words); i++) {
        if (!strcmp(words[i], w)) return i;
    }
    return -1;
}

// ---- items from a file
// A file of dialogues has one JSON object a line; blank lines are skipped:
//   {"task":..,"score":..,"messages":[{"role":"user","content":..},
//                                     {"role":"assistant","content":..,"answers":[..],"choices":[..]},..]}
// The roles alternate, and the user begins. A reply is the right one, as a whole sentence; it is scored where
// it has answers ("answers" or "answer"), and may then lack "content". Beside the answers may stand
// "position" of the question in its message (begin, middle, end) and "depth" of the evidence (0 to 100).
// All this may also stand beside "messages" for the last message of the user, its reply as "reply"; then
// the replies before it are given, and nobody is asked for them. An item may also have "text" (a number:
// items of one text, which stand together, are versions of it) and "length" (tokens).
// The readers return 0; or -1, with err filled, when the line is none of them.

// Reads the list of texts obj[key], which is not empty. *list stays as it is when there is none.
static int read_list(const Json *obj, const char *key, const Json **list, char err[512]) {
    const Json *j = json_get(obj, key);
    if (json_none(j)) return 0;
    if (j->type != JSON_ARRAY || !j->n) return fault(err, "'%s' is no list of texts", key);
    for (int i = 0; i < j->n; i++)
        if (j->item[i].type != JSON_STRING) return fault(err, "'%s' holds something else than texts", key);
    *list = j;
    return 0;
}

// Notes where the first answer stands in the right reply: as a whole, else word by word ("12 7" in "They are
// 12 and 7."). Of an answer that is not there nothing is noted.
static void mark_answer(EvalTurn *t) {
    const char *gold = t->answers ? t->answers->item[0].str : "", *at = t->reply ? t->reply : "";
    int whole = strstr(at, gold) != NULL, n;
    arrsetlen(t->span, 0);
    for (; *gold; gold += n + (gold[n] == ' ')) {
        n = whole ? (int)strlen(gold) : (int)strcspn(gold, " ");
        while (*at && strncmp(at, gold, (size_t)n)) at++;
        if (!*at) {
            arrsetlen(t->span, 0);
            return;
        }
        arrput(t->span, (int)(at - t->reply));
        at += n;
        arrput(t->span, (int)(at - t->reply));
    }
}

// Reads what a reply is scored by into *t: from an assistant's message, or from the item itself.
static int read_gold(const Json *obj, EvalTurn *t, char err[512]) {
    const char *answers = json_get(obj, "answers") ? "answers" : "answer";
    if (read_list(obj, answers, &t->answers, err) || read_list(obj, "choices", &t->classes, err)) return -1;
    if (json_get(obj, "depth") && read_whole(obj, "depth", 0, 100, &t->depth, err)) return -1;
    t->position = max_int(t->position, word_place("begin|middle|end", json_text(obj, "position")));
    mark_answer(t);
    return 0;
}

// Reads the messages of an item into *it: a user's begins a turn, the assistant's ends it. What stands beside the
// messages is about the last one of the user.
static int read_messages(const Json *obj, const Json *list, EvalItem *it, char err[512]) {
    Message *m = messages_of_json(list, err);
    int n = (int)arrlen(m), bad = !m;
    if (m && !strcmp(m->role, "system")) bad = fault(err, "a system message is given by --system");
    for (int i = 0; i < n && !bad; i++) {
        if (i % 2 == 0) arrput(it->turn, ((EvalTurn){ .user = m[i].content, .position = -1, .depth = -1 }));
        EvalTurn *t = &arrlast(it->turn);
        if (i % 2 && *m[i].content) t->reply = m[i].content;
        if (i % 2) bad = read_gold(&list->item[i], t, err);
    }
    arrfree(m);
    if (bad || n % 2 == 0) return bad;
    EvalTurn *last = &arrlast(it->turn);
    for (EvalTurn *t = it->turn; t < last; t++) t->given = !t->answers;
    if (*json_text(obj, "reply")) last->reply = json_text(obj, "reply");
    return read_gold(obj, last, err);
}

// Reads an item from the object of its line and appends it to the run, a faulty one as well: the run frees it. The
// texts of its file are numbered from `first` on.
static int read_item(EvalRun *x, const Tokenizer *tok, const Json *obj, int first, char err[512]) {
    const char *task = json_text(obj, "task"), *score = json_text(obj, "score");
    int text = arrlen(x->item) ? arrlast(x->item).number + 1 - first : 0, bad;      // unless it names another
    EvalItem it = { .task = *task ? task : "file" };
    it.metric = *score ? word_place(eval_metrics, score) : METRIC_FOUND;
    if (obj->type != JSON_OBJECT) bad = fault(err, "is no object");
    else if (json_holds_nul(obj)) bad = fault(err, "a text holds the character \\u0000");
    else if (it.metric < 0)
        bad = fault(err, "'score' wants one of f1, choice, rouge, found, exact, found '%.40s' (other benchmarks: "
                    "data/lm_eval_kvcomp.py)", score);
    else bad = read_messages(obj, json_get(obj, "messages"), &it, err);

    for (int i = 0; i < (int)arrlen(it.turn) && !bad; i++) {
        const EvalTurn *t = &it.turn[i];
        int *ids = tokenizer_encode(tok, t->user, strlen(t->user), 0, NULL);
        it.length += (int)arrlen(ids);
        arrfree(ids);
        if (it.metric == METRIC_CLASS && t->answers && !t->classes)
            bad = fault(err, "turn %d: score choice wants 'choices'", i + 1);
    }
    if (!bad && json_get(obj, "text")) bad = read_whole(obj, "text", 0, INT_MAX - first, &text, err);
    if (!bad && json_get(obj, "length")) bad = read_whole(obj, "length", 1, INT_MAX, &it.length, err);
    it.number = first + text;
    arrput(x->item, it);
    return bad;
}

// Reads the items of the first `texts` texts of a file. Ends the program with EXIT_USAGE, and the number of the line,
// on the first one that is malformed, and when no turn of them is scored.
static void read_items(EvalRun *x, const Tokenizer *tok, const char *path, int texts) {
    char err[512];
    size_t n;
    char *text = read_bounded(path, MOST_TEXT, &n, err);
    if (!text) die(EXIT_USAGE, "--eval %s", err);

    char *stop = text + n, *end;
    int line = 1, scored = 0, old = (int)arrlen(x->item), first = old ? arrlast(x->item).number + 1 : 0;
    for (char *p = text; p < stop; p = end + 1, line++) {
        end = memchr(p, '\n', (size_t)(stop - p));
        if (!end) end = stop;
        if (is_blank(p, end)) continue;
        Json *obj = json_parse(p, (size_t)(end - p), err);
        if (obj) arrput(x->text, obj);
        if (!obj || read_item(x, tok, obj, first, err)) {
            free(text);
            die(EXIT_USAGE, "--eval %s, line %d: %s", path, line, err);
        }
        int k = (int)arrlen(x->item) - 1;
        texts -= k == old || x->item[k].number != x->item[k - 1].number;
        if (texts < 0) {
            item_free(&x->item[k]);
            (void)arrpop(x->item);
            break;
        }
        x->hash = hash_bytes(x->hash, p, (size_t)(end - p));
    }
    free(text);
    for (int i = old; i < (int)arrlen(x->item); i++) scored += scored_turns(&x->item[i]);
    if (!scored) die(EXIT_USAGE, "--eval %s: no turn has 'answers'", path);
}

// ---- how an item is played
// What comes of a scored turn, or of the window of a text.
typedef struct {
    char *said;                 // the method's reply (free pass), malloc'd
    double nll;                 // NLL of the right answer per token, in nats (forced pass)
    double predicted;           // tokens of the right reply, with the frame around the answer (forced pass) ..
    double kld;                 // .. their KL divergence from full attention, a sum over them
    double top1;                // .. and those of them where the best token is that of full attention
} Played;

// log(sum of exp(x)) of n logits, so that log p_i = x_i - log_sum_exp(x).
double log_sum_exp(const float *x, int n) {
    double max = x[argmax(x, n)], sum = 0;
    for (int i = 0; i < n; i++) sum += exp(x[i] - max);
    return max + log(sum);
}

// KL(softmax p || softmax q) of two rows of logits (n), in nats. Rounding never makes it negative.
static double divergence(const float *p, const float *q, int n) {
    double zp = log_sum_exp(p, n), zq = log_sum_exp(q, n), sum = 0;
    for (int i = 0; i < n; i++) sum += exp(p[i] - zp) * ((p[i] - zp) - (q[i] - zq));
    return sum > 0 ? sum : 0;
}

// Compares the method's logits y (V) with those of full attention, where there are any. -> the NLL of the token `right`
// that follows.
static double note_logits(const float *ref, const float *y, int V, int right, Played *x) {
    x->predicted++;
    x->kld += ref ? divergence(ref, y, V) : 0;
    x->top1 += ref && argmax(ref, V) == argmax(y, V);
    return log_sum_exp(y, V) - y[right];
}

// Renders a message by the chat template, appends it to the record and prefills it.
static void play_prefill(App *a, const char *text) {
    char err[512];
    Turn t = render_turn(a, text, err);
    if (*err) die(EXIT_MODEL, "%s", err);
    session_take_back(a, &t, err);
    arrput(a->turn, t);
    feed_prefill(a, &t);
}

// The right reply as ids (stb_ds): the sentence, else the first answer. A turn that is not scored
// and has no reply is answered with "Okay."
static int *gold_ids(const App *a, const EvalTurn *t) {
    const char *text = "Okay.";
    if (t->reply) text = t->reply;
    else if (t->answers) text = t->answers->item[0].str;
    int *ids = tokenizer_encode(a->tok, text, strlen(text), 0, NULL);
    ids_must_have_rows(a->c, ids, (int)arrlen(ids));             // their logits are read before they are fed
    return ids;
}

// Does a token of the reply, its bytes [from,to), touch the answer?
static int in_answer(const EvalTurn *t, int from, int to) {
    int hit = !arrlen(t->span);
    for (int i = 0; i + 1 < (int)arrlen(t->span); i += 2) hit |= from < t->span[i + 1] && to > t->span[i];
    return hit;
}

// Feeds the right reply to turn i, whose message has been read, token by token.
//   ref NULL          nothing is asked
//   *ref, x NULL      full attention plays: its logits at every token are appended to *ref (stb_ds, V a row)
//   *ref, x           a method plays: its logits are compared with the rows at *ref, which moves on, and what comes of
//                     it is noted in x
static void play_right(App *a, const EvalItem *it, int i, float **ref, Played *x) {
    const EvalTurn *t = &it->turn[i];
    int *ids = gold_ids(a, t), n = (int)arrlen(ids), V = a->c->V, counted = 0, last = i == (int)arrlen(it->turn) - 1;
    Decoder d = { .t = a->tok };
    char *text = NULL;
    for (int k = 0; k < n; k++) {
        int from = (int)arrlen(text);
        text = decode_token(&d, ids[k], text);
        if (ref && !x) memcpy(arraddnptr(*ref, V), a->s->logits, (size_t)V * sizeof **ref);
        if (ref && x) {
            double nll = note_logits(*ref, a->s->logits, V, ids[k], x);
            int counts = in_answer(t, from, (int)arrlen(text));
            counted += counts;
            x->nll += counts ? nll : 0;
            *ref += V;
        }
        if (last && k == n - 1) break;                  // nothing is asked behind the last token of the dialogue
        arrput(arrlast(a->turn).dec, ids[k]);
        decode(a->s, ids[k]);
    }
    if (x) x->nll /= max_int(counted, 1);
    arrfree(ids);
    arrfree(text);
}

// The method's own reply to a turn whose message has been read (malloc'd). It may be as long as --n-predict, by default
// 64 tokens or twice the right reply, whichever is more.
static char *play_own(App *a, const EvalTurn *t) {
    int *right = gold_ids(a, t), most = opt_int(a->o, "n-predict");     // negative: the default
    char *said = NULL;
    size_t n = 0;
    FILE *f = memory_stream(&said, &n);
    generate(a, most < 0 ? max_int(2 * (int)arrlen(right), 64) : most, f);
    memory_stream_close(f);
    arrfree(right);
    return said;
}

// Both passes begin with the turns whose replies are given, and the message of the first one that is asked.
// Returns that turn.
static int play_given(App *a, const EvalItem *it) {
    int i = 0;
    record_clear(a);
    session_reset(a->s);
    interrupts = 0;
    play_prefill(a, it->turn[0].user);
    while (it->turn[i].given) {
        play_right(a, it, i, NULL, NULL);
        play_prefill(a, it->turn[++i].user);
    }
    return i;
}

// Plays the turns of an item from `first` on, whose message has been read. x: one a scored turn.
//   ref NULL    the free pass: the method answers, and what it says in scored turns is noted
//   ref         the forced pass: the right replies are fed, whatever the method would say (ref and x: see play_right)
static void play_turns(App *a, const EvalItem *it, int first, float **ref, Played *x) {
    for (int i = first, k = 0; i < (int)arrlen(it->turn); i++) {
        const EvalTurn *t = &it->turn[i];
        Played *noted = x && t->answers ? &x[k++] : NULL;
        if (i > first) play_prefill(a, t->user);
        if (ref || t->given) {
            play_right(a, it, i, t->answers ? ref : NULL, noted);
            continue;
        }
        char *said = play_own(a, t);
        if (noted) noted->said = said;
        else free(said);
    }
}

// The forced pass in a copy of this process, which holds the session as it is, whatever its method keeps: so
// what both passes begin with is computed once. The copy notes its numbers in memory that both see, and this process
// waits for it. 0; -1: nothing was played, because a copy has but one thread, no GPU, and would write into the trace.
static int play_forced_in_copy(App *a, const EvalItem *it, int first, float *ref, Played *x) {
    if (n_threads() > 1 || KV_DEV(a->s) || a->trace) return -1;
    size_t bytes = arrlenu(x) * sizeof *x;
    Played *seen = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int status;
    fflush(NULL);                           // else the copy would write once more what waits in buffers
    pid_t copy = seen != MAP_FAILED ? fork() : -1;
    if (!copy) {
        play_turns(a, it, first, &ref, seen);
        _exit(0);
    }
    if (copy > 0) {
        if (waitpid(copy, &status, 0) != copy || WIFSIGNALED(status))
            die(EXIT_RUN, "--eval: the copy of this process that plays the right replies was killed");
        if (status) exit(WEXITSTATUS(status));              // it has said why
        memcpy(x, seen, bytes);
    }
    if (seen != MAP_FAILED) munmap(seen, bytes + 1);
    return copy > 0 ? 0 : -1;
}

// What the session has cost since it was reset, as the end of a line of --eval-out.
static void write_cost(const App *a, FILE *f) {
    const Clock *k = &a->s->clk;
    json_print(f, "'kv_bytes_stored':%zu,'kv_bytes_full':%zu,", kv_bytes(a->s), kv_bytes_full(a->s));
    json_print(f, "'kv_bytes_attended':%.17g,'kv_bytes_peak':%zu,", bytes_a_step(a->s), k->peak);
    json_print(f, "'prefill_s':%.17g,'decode_s':%.17g,", k->prefill, k->decode);
    json_print(f, "'n_prefill':%ld,'n_decode':%ld}\n", k->n_prefill, k->n_decode);
}

// Plays an item through a->s, both passes, into x (stb_ds, one a scored turn). ref: the logits of full attention.
// Returns what the free pass cost, malloc'd.
static char *play_item(App *a, const EvalItem *it, float *ref, Played *x) {
    int first = play_given(a, it), apart = play_forced_in_copy(a, it, first, ref, x);
    play_turns(a, it, first, NULL, x);
    char *cost = written(a, write_cost);
    if (apart) play_turns(a, it, play_given(a, it), &ref, x);
    return cost;
}

// Plays a window of a text through a->s. Half of it is prefilled, and each further token is decoded; every token of the
// second half is predicted from what came before it. A session of full attention (NULL: none) sees the same tokens, and
// the logits are compared. Returns what it cost, malloc'd.
static char *play_window(App *a, const EvalItem *it, Session *full, Played *x) {
    int half = it->length / 2;
    x->said = copy_text("");
    session_reset(a->s);
    if (full) session_reset(full);
    for (int i = half - 1; i < it->length - 1; i++) {   // token i is the last one seen, i+1 is predicted
        int id = it->ids[i];
        const float *y = i < half ? prefill(a->s, it->ids, half) : decode(a->s, id), *ref = NULL;
        if (full) ref = i < half ? prefill(full, it->ids, half) : decode(full, id);
        x->nll += note_logits(ref, y, a->c->V, it->ids[i + 1], x) / (it->length - half);
    }
    return written(a, write_cost);
}

// ---- metrics: words
// Every metric takes two texts, what was said and what is right (gold), and returns 0..1.

// Takes a word out of a list: 1; 0: it is not in it.
static int word_take(char **words, const char *w) {
    int i = word_in(words, w);
    if (i < 0) return 0;
    free(words[i]);
    arrdelswap(words, i);
    return 1;
}

// How many words two bags share, which b loses: a word that comes twice in both counts twice.
static int bag_shared(char **a, char **b) {
    int same = 0;
    for (int i = 0; i < (int)arrlen(a); i++) same += word_take(b, a[i]);
    return same;
}

// The length of the longest common subsequence of two lists of words. Behind word i of a, same[j+1] is that of a's
// first words and the first j+1 words of b.
static int order_shared(char **a, char **b) {
    int n = (int)arrlen(a), m = (int)arrlen(b), *same = xcalloc((size_t)m + 1, sizeof *same);
    for (int i = 0; i < n; i++) {
        for (int j = 0, before = 0; j < m; j++) {
            int above = same[j + 1];
            same[j + 1] = strcmp(a[i], b[j]) ? max_int(above, same[j]) : before + 1;
            before = above;
        }
    }
    int longest = same[m];
    free(same);
    return longest;
}

// The F measure of two texts, cut into words as WORDS_* says, of which some are shared: the harmonic mean of precision,
// their share of what was said, and recall, that of what is right. Of bags of words it is F1, of words in their order
// Rouge-L.
static double f_measure(const char *said, const char *gold, int how, int (*shared)(char **a, char **b)) {
    char **a = words_of(said, how), **b = words_of(gold, how);
    double n = (double)arrlen(a), m = (double)arrlen(b), same = shared(a, b);
    words_free(a);
    words_free(b);
    return same > 0 ? 2 * (same / n) * (same / m) / (same / n + same / m) : 0;
}

// Accuracy on TREC as LongBench means it, from the first line of the reply. If the line names the
// right label, the point is shared among all labels that the line names. Labels that are a part of
// the right one do not count: whoever says the right one says them, too.
static double class_accuracy(const char *said, const char *gold, const Json *classes) {
    while (*said == '\n') said++;
    char *line = copy_bytes(said, strcspn(said, "\n"));
    int named = 0, hit = 0;
    for (int i = 0; classes && i < classes->n; i++) {
        const char *label = classes->item[i].str;
        if (!strstr(line, label)) continue;
        if (!strcmp(label, gold)) hit = 1;
        else if (strstr(gold, label)) continue;
        named++;
    }
    free(line);
    return hit ? 1.0 / named : 0;
}

// ---- metrics: the score of a reply
// The score of a reply against one right answer.
static double score_by(int metric, const char *said, const char *gold, const Json *classes) {
    switch (metric) {
    case METRIC_CLASS:           return class_accuracy(said, gold, classes);
    case METRIC_ROUGE:           return f_measure(said, gold, WORDS_RAW, order_shared);
    case METRIC_FOUND:           return holds_answer(said, gold, 0);
    case METRIC_EXACT:           return holds_answer(said, gold, 1);
    default:                     return f_measure(said, gold, WORDS_BARE, bag_shared);
    }
}

// The best score over the right answers of a turn.
static double best_score(int metric, const char *said, const EvalTurn *t) {
    double best = 0;
    for (int i = 0; t->answers && i < t->answers->n; i++)
        best = fmax(best, score_by(metric, said, t->answers->item[i].str, t->classes));
    return best;
}

// The reply without the sentence around its answer: "The code is 4821." leaves "4821.", so that a
// model that answers in whole sentences is scored as one that answers in a word. Each word of the
// right reply's frame ("The code is" of "The code is {4821}.") goes once; a wrong value stays. Without a known frame
// the reply is copied. Malloc'd.
static char *without_frame(const EvalTurn *t, const char *said) {
    if (!arrlen(t->span)) return copy_text(said);
    char *text = copy_text(t->reply), *out = NULL;
    for (int i = 0; i + 1 < (int)arrlen(t->span); i += 2)
        memset(text + t->span[i], ' ', (size_t)(t->span[i + 1] - t->span[i]));
    char **frame = words_of(text, WORDS_PLAIN), **words = words_of(said, WORDS_RAW);
    for (int i = 0; i < (int)arrlen(words); i++) {
        char **plain = words_of(words[i], WORDS_PLAIN);
        if (!plain || !word_take(frame, plain[0])) put_part(&out, " ", words[i]);
        words_free(plain);
    }
    free(text);
    text = copy_bytes(out ? out : "", arrlenu(out));
    arrfree(out);
    words_free(frame);
    words_free(words);
    return text;
}

// Writes a scored turn of an item, and what came of it, as an answer of a line of --eval-out.
static void write_answer(const EvalItem *it, int turn, const Played *x, FILE *f) {
    const EvalTurn *t = &it->turn[turn];
    char *rest = without_frame(t, x->said);
    json_print(f, "{'task':%s,'gold':%s,'prediction':%s,", it->task, t->answers->item[0].str, x->said);
    json_print(f, "'text':%d,'turn':%d,'turns':%d,", it->number, turn, (int)arrlen(it->turn));
    json_print(f, "'position':%d,'length':%d,'depth':%d,", t->position, it->length, t->depth);
    json_print(f, "'score':%.17g,'found':%.17g,", best_score(it->metric, rest, t), best_score(METRIC_FOUND, rest, t));
    json_print(f, "'nll':%.17g,'predicted':%.17g,'kld':%.17g,'top1':%.17g}", x->nll, x->predicted, x->kld, x->top1);
    free(rest);
}

// ---- scores and intervals
// A number of a row is a mean over its answers, which are put together by text: the versions and turns of a text say
// much the same. An interval holds the 95 % in the middle of 1,000 such means, each over texts drawn with
// replacement. From fewer than five texts nothing is drawn: that would say nothing about others.
enum { RESAMPLES = 1000, TEXTS_FOR_INTERVAL = 5 };

// What the answers of a text give to a mean.
typedef struct {
    double text;
    double sum;
    double n;               // how many numbers the sum is of
} Sum;

// Which answers of a row: a "position" -1..2 (where the question stands: 0 begin, 1 middle, 2 end), or one of these.
enum {
    ANY_PLACE = -2,
    LAST_TURN = -3      // the last turns of the items
};

// The parts of a row's answers of a task (NULL: any task) at a place: what they have by that name. "kld" and "top1" are
// sums over the predicted tokens, the others are one number. stb_ds; NULL when there are none.
static Sum *sums_of(const EvalRow *row, const char *task, int place, const char *name) {
    int of_tokens = word_place("kld|top1", name) >= 0;
    Sum *part = NULL;
    for (int i = 0; i < (int)arrlen(row->answer); i++) {
        const Json *x = row->answer[i];
        double turns_behind = json_num(x, "turns") - 1 - json_num(x, "turn");
        if (task && strcmp(task, json_text(x, "task"))) continue;
        if (place == LAST_TURN ? turns_behind > 0 : place != ANY_PLACE && place != json_num(x, "position")) continue;
        double text = json_num(x, "text");
        if (!part || arrlast(part).text != text) arrput(part, ((Sum){ .text = text }));
        arrlast(part).sum += json_num(x, name);
        arrlast(part).n += of_tokens ? json_num(x, "predicted") : 1;
    }
    return part;
}

// Orders doubles, for qsort.
static int double_order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// The mean of some parts.
static double mean_of(const Sum *x) {
    double sum = 0, n = 0;
    for (int i = 0; i < (int)arrlen(x); i++) {
        sum += x[i].sum;
        n += x[i].n;
    }
    return n > 0 ? sum / n : 0;
}

// The 2.5th (*lo) and the 97.5th percentile (*hi) of the mean of these parts, or with base, another row's of the same
// answers, of its difference from the mean of those.
static void bootstrap(const Sum *x, const Sum *base, double *lo, double *hi) {
    double mean[RESAMPLES];
    int texts = (int)arrlen(x);
    uint64_t seed = 1;
    for (int r = 0; r < RESAMPLES; r++) {
        double sum = 0, n = 0;
        for (int i = 0; i < texts; i++) {
            int k = (int)(splitmix64(&seed) % (uint64_t)texts);
            sum += x[k].sum - (base ? base[k].sum : 0);
            n += x[k].n;
        }
        mean[r] = n > 0 ? sum / n : 0;
    }
    qsort(mean, RESAMPLES, sizeof *mean, double_order);
    *lo = mean[RESAMPLES / 40];
    *hi = mean[RESAMPLES - 1 - RESAMPLES / 40];
}

// ---- tables: the fields of a row
// A row is a list of fields (stb_ds). A table shows some of them, CSV and JSON have all.

// Appends a number to *c; fmt prints it in a table, NULL: as bytes. What is none is a dash there, null in JSON and
// nothing in CSV.
static void add_field(Field **c, int shown, const char *name, double x, const char *fmt) {
    Field k = { .x = x, .shown = shown };
    snprintf(k.name, sizeof k.name, "%s", name);
    for (char *p = k.name; *p; p++)                     // the task name of a file must not break a table
        if (!isalnum((unsigned char)*p) && !strchr("_.-", *p)) *p = '_';
    if (isnan(x)) snprintf(k.text, sizeof k.text, "-");
    else if (fmt) snprintf(k.text, sizeof k.text, fmt, x);
    else snprintf(k.text, sizeof k.text, "%s", human_bytes(x).text);
    arrput(*c, k);
}

// Appends a word, which stays the caller's.
static void add_word(Field **c, int shown, const char *name, const char *word) {
    add_field(c, shown, name, NAN, NULL);
    arrlast(*c).word = word;
}

// The row that the gaps of row s are measured from: that of the first method, the one with the same
// budget if it has several.
static const EvalRow *base_of(const EvalRow *s, const EvalRun *run) {
    const EvalRow *base = run->rows;
    for (const EvalRow *row = run->rows; row < run->rows + arrlen(run->rows); row++)
        if (!strcmp(row->side.app.method, base->side.app.method) && row->budget == s->budget) base = row;
    return base;
}

// Appends, of some answers of the row as sums_of takes them, if there are any: NAME, their mean; _lo and _hi, the ends
// of its interval; _gap, how far it is above the mean of the base, and the ends of that one's interval. A table shows
// the mean, and all of it with `whole`.
static void add_mean(Field **c, int whole, const char *name, const EvalRow *s, const EvalRun *run, const char *task,
                     int place, const char *of) {
    static const char *const part[] = { "", "_lo", "_hi", "_gap", "_gap_lo", "_gap_hi" };
    Sum *x = sums_of(s, task, place, of), *base = sums_of(base_of(s, run), task, place, of);
    double value[] = { mean_of(x), NAN, NAN, mean_of(x) - mean_of(base), NAN, NAN };
    if (arrlen(x) >= TEXTS_FOR_INTERVAL && arrlen(base) == arrlen(x)) {
        bootstrap(x, NULL, &value[1], &value[2]);
        bootstrap(x, base, &value[4], &value[5]);
    }
    for (int i = 0; x && i < 6; i++) {
        char full_name[64];
        snprintf(full_name, sizeof full_name, "%.40s%s", name, part[i]);
        add_field(c, whole || !i, full_name, value[i], i < 3 ? "%.4f" : "%+.4f");
    }
    arrfree(x);
    arrfree(base);
}

// Appends what a row scored: over everything, by task in the order of the items, by the place of the question
// (LAST_TURN on), and how often its answers were found.
static void score_fields(Field **c, const EvalRow *s, const EvalRun *run) {
    static const char *const places[] = { "last_turn", NULL, "alone", "begin", "middle", "end" };
    char **tasks = NULL;
    add_mean(c, 1, "score", s, run, NULL, ANY_PLACE, "score");
    for (int i = 0; i < (int)arrlen(s->answer); i++) {
        const char *task = json_text(s->answer[i], "task");
        if (word_in(tasks, task) >= 0) continue;
        add_mean(c, 0, task, s, run, task, ANY_PLACE, "score");
        arrput(tasks, (char *)task);
    }
    for (int i = 0; i < 6; i++)
        if (places[i]) add_mean(c, 0, places[i], s, run, NULL, LAST_TURN + i, "score");
    add_mean(c, 0, "found", s, run, NULL, ANY_PLACE, "found");
    arrfree(tasks);
}

// The sum of a number over the items that a row has played; of a peak the largest.
static double cost_of(const EvalRow *s, const EvalRun *run, const char *name) {
    double sum = 0, most = 0;
    for (int i = 0; i < run->items; i++) {
        double x = s->line[i] ? json_num(s->line[i], name) : 0;
        sum += x;
        most = fmax(most, x);
    }
    return strcmp(name, "kv_bytes_peak") ? sum : most;
}

// All fields of a row (stb_ds): whose it is; scores, or the perplexity of a text; divergence from full attention and
// the share of best tokens that are its; bytes and speed.
Field *row_fields(const EvalRow *s, const EvalRun *run) {
    Field *c = NULL;
    int items = 0;
    double full = cost_of(s, run, "kv_bytes_full"), stored = cost_of(s, run, "kv_bytes_stored");
    double prefill_s = cost_of(s, run, "prefill_s"), decode_s = cost_of(s, run, "decode_s");
    for (int i = 0; i < run->items; i++) items += s->line[i] != NULL;
    add_word(&c, 1, "method", s->side.app.method);
    add_field(&c, 1, "budget", s->budget, "%.0f");
    add_field(&c, 0, "items", items, "%.0f");
    add_field(&c, 0, "scored", (double)arrlen(s->answer), "%.0f");
    if (run->ids) {
        Sum *x = sums_of(s, NULL, ANY_PLACE, "nll");
        add_field(&c, 1, "ppl", exp(mean_of(x)), "%.4f");
        arrfree(x);
    } else {
        score_fields(&c, s, run);
        add_mean(&c, 0, "nll", s, run, NULL, ANY_PLACE, "nll");
    }
    if (!run->ids || run->kld) {
        add_mean(&c, 0, "kld_mean", s, run, NULL, ANY_PLACE, "kld");
        add_mean(&c, 0, "top1", s, run, NULL, ANY_PLACE, "top1");
    }
    items = max_int(items, 1);
    add_field(&c, 1, "stored", stored / (full > 0 ? full : 1), "%.3f");
    add_field(&c, 1, "kv_bytes_stored", stored / items, NULL);
    add_field(&c, 0, "kv_bytes_full", full / items, NULL);
    add_field(&c, 1, "kv_bytes_attended", cost_of(s, run, "kv_bytes_attended") / items, NULL);
    add_field(&c, 1, "kv_bytes_peak", cost_of(s, run, "kv_bytes_peak"), NULL);
    add_field(&c, 1, "prefill_s", prefill_s, "%.2f");
    add_field(&c, 0, "pp_tok_s", rate((long)cost_of(s, run, "n_prefill"), prefill_s), "%.4g");
    add_field(&c, 1, "tg_tok_s", rate((long)cost_of(s, run, "n_decode"), decode_s), "%.4g");
    add_word(&c, 0, "model", run->model);
    return c;
}

// ---- tables: text, CSV, JSON
// What a table has at field i of row r; of row -1 its name.
static const char *cell_text(Field **rows, int r, int i) {
    const Field *k = &rows[max_int(r, 0)][i];
    if (r < 0) return k->name;
    return k->word ? k->word : k->text;
}

// Prints rows that have the same fields as a table: in Markdown with cols 0, else aligned for a screen of so many
// columns, and in blocks one below the other where the table is wider than that; each begins with the first two fields.
static void print_text(Field **rows /* stb_ds */, int cols) {
    static const char *const before[2][2] = { { "| ", " | " }, { "", "  " } };      // a cell: the first one, the others
    int *shown = NULL, *width = NULL, n_rows = (int)arrlen(rows), keys = 0;
    for (int i = 0; n_rows && i < (int)arrlen(rows[0]); i++) {
        int w = 0;
        if (!rows[0][i].shown) continue;
        for (int r = -1; r < n_rows && cols; r++) w = max_int(w, (int)strlen(cell_text(rows, r, i)));
        arrput(shown, i);
        arrput(width, w);
        if (arrlen(shown) <= 2) keys += w + 2 * (arrlen(shown) > 1);
    }
    int n = (int)arrlen(shown), key = min_int(2, n);
    for (int from = key, to; from < n; from = to) {
        int x = keys;
        for (to = from; to < n && (!cols || to == from || x + 2 + width[to] <= cols); to++) x += 2 + width[to];
        if (from > key) printf("\n");
        for (int r = -1; r < n_rows; r++) {
            for (int i = 0; i < to; i++) {
                if (i >= key && i < from) continue;
                printf(i ? "%s%*s" : "%s%-*s", before[cols > 0][i > 0], width[i], cell_text(rows, r, shown[i]));
            }
            printf(cols ? "\n" : " |\n");
            for (int i = 0; i < n && r < 0 && !cols; i++) printf(i ? "|---:" : "|---");
            if (r < 0 && !cols) printf("|\n");
        }
    }
    arrfree(shown);
    arrfree(width);
}

// Prints rows that have the same fields as CSV, below a line of their names.
static void print_csv(Field **rows /* stb_ds */) {
    for (int r = -1; r < (int)arrlen(rows); r++) {
        for (int i = 0; i < (int)arrlen(rows[0]); i++) {
            const Field *k = &rows[max_int(r, 0)][i];
            if (i) printf(",");
            if (r < 0) printf("%s", k->name);
            else if (k->word) printf(strchr(k->word, ',') ? "\"%s\"" : "%s", k->word);
            else if (isfinite(k->x)) json_real(stdout, k->x, 6);
        }
        printf("\n");
    }
}

// Writes a row as a JSON object on one line, with the options that the user set.
void print_json_row(const Field *c, const App *a, FILE *f) {
    fputc('{', f);
    for (int i = 0; i < (int)arrlen(c); i++) {
        fprintf(f, "\"%s\":", c[i].name);
        if (c[i].word) json_escape(f, c[i].word, strlen(c[i].word));
        else json_real(f, c[i].x, 6);
        fputc(',', f);
    }
    json_options(a, f);
    fprintf(f, "}\n");
}

// Prints rows that have the same fields, and frees them, in the form that the options ask for: JSON lines, CSV, or a
// table, of Markdown where stdout is no terminal.
static void print_table(Field **rows /* stb_ds */, const App *a) {
    int json = opt_int(a->o, "json"), csv = opt_int(a->o, "csv");
    if (csv) print_csv(rows);
    if (!csv && !json) print_text(rows, isatty(1) ? screen_columns() : 0);
    for (int r = 0; r < (int)arrlen(rows); r++) {
        if (json) print_json_row(rows[r], a, stdout);
        arrfree(rows[r]);
    }
    arrfree(rows);
    fflush(stdout);
}

// ---- the modes: the rows of a run
// Has every part of "lychee+pats" the name of a method?
static int names_methods(const char *spec) {
    char part[160];
    while (next_word(&spec, "+", part, sizeof part))
        if (!method_find(part, strlen(part))) return 0;
    return 1;
}

// Opens every row of --compare x --budgets before anything runs, so that a wrong name ends the program at once. A
// method without a budget gets one row. Among several those that cannot be opened, as where a file beside the model is
// missing, are left out, and said; one alone ends the program. Returns the rows (stb_ds).
static EvalRow *open_rows(const App *a) {
    char name[160], budget[160], err[512] = "no method is named";
    const char *list = *opt_str(a->o, "compare") ? opt_str(a->o, "compare") : a->method;
    int several = strchr(list, ',') != NULL, own_budget = !opt_given(a->o, "budgets");
    Options *o = options_copy(a->o);
    EvalRow *rows = NULL;
    while (next_word(&list, ",", name, sizeof name)) {
        const char *budgets = own_budget ? "its own" : opt_str(a->o, "budgets");
        while (next_word(&budgets, ",", budget, sizeof budget)) {
            EvalRow row = { 0 };
            if (!own_budget && options_set(o, "budget", budget, err)) die(EXIT_USAGE, "--budgets: %s", err);
            side_open(&row.side, a, o, name);
            if (!row.side.app.s) {
                snprintf(err, sizeof err, "%s", row.side.refused);
                side_close(&row.side);
                if (!several || !names_methods(name)) die(EXIT_USAGE, "%s", err);
                warn("%s is left out: %s", name, err);
                break;
            }
            row.made = written(&row.side.app, write_making);
            row.budget = uses_budget(row.side.app.s) ? row.side.app.s->budget : 0;
            arrput(rows, row);
            if (!uses_budget(row.side.app.s)) break;
        }
    }
    options_free(o);
    if (!rows) die(EXIT_USAGE, "%s", err);
    return rows;
}

// ---- answers on disk (--eval-out, --eval-shard, --eval-merge)
// A file of answers has a JSON line for each item as one row played it: the run and the row it belongs to, the answers
// with all that the table needs of them, and what it cost. It is written at once, and is the unit of going on: a last
// line without its end was interrupted, and is played again. A file is written in place, unlike every other one that is
// kept, because what is in it is the point. Numbers have 17 digits, so what is read is what was written, and a table is
// made from the same numbers in the same order whether a run was whole, went on, or was spread over machines. A run
// with other methods or budgets may share the file: it takes the lines of its own rows, and adds what is missing.

static const char answers_mark[] = "{\"kvcomp\":\"answers 4\",";     // begins every line
enum { EVAL_ITEMS = 1 << 20 };                                      // most items of a run

// The numbers that a line has, and each of its answers; null is one, too.
static const char cost_numbers[] = "kv_bytes_stored|kv_bytes_full|kv_bytes_attended|kv_bytes_peak|"
                                   "prefill_s|decode_s|n_prefill|n_decode";
static const char answer_numbers[] = "text|turn|turns|position|length|depth|score|found|nll|predicted|kld|top1";

// Is item i there in every row?
static int item_is_there(const EvalRun *x, int i) {
    int r = 0, rows = (int)arrlen(x->rows);
    while (r < rows && x->rows[r].line[i]) r++;
    return r == rows;
}

// The answers that count: of items that every row has played, so that rows stay comparable. What else was played is
// dropped. Returns how many items are missing; the numbers of the first ones go to text.
static int rows_end(EvalRun *x, char text[160]) {
    int missing = 0;
    *text = 0;
    for (int i = 0; i < x->items; i++) {
        int there = item_is_there(x, i);
        for (EvalRow *row = x->rows; row < x->rows + arrlen(x->rows); row++) {
            const Json *answers = json_get(row->line[i], "answers");
            for (int k = 0; there && k < answers->n; k++) arrput(row->answer, &answers->item[k]);
            if (!there) json_free(row->line[i]);
            if (!there) row->line[i] = NULL;
        }
        size_t n = strlen(text);
        if (!there && ++missing <= 8) snprintf(text + n, 160 - n, "%s%d", n ? ", " : "", i + 1);
    }
    return missing;
}

// Frees what x holds, and closes its file.
static void eval_close(EvalRun *x) {
    for (int r = 0; r < (int)arrlen(x->rows); r++) {
        EvalRow *row = &x->rows[r];
        for (int i = 0; i < x->items; i++) json_free(row->line[i]);
        arrfree(row->answer);
        free(row->line);
        free(row->made);
        side_close(&row->side);
    }
    for (int i = 0; i < (int)arrlen(x->item); i++) item_free(&x->item[i]);
    for (int i = 0; i < (int)arrlen(x->text); i++) json_free(x->text[i]);
    free(x->run);
    arrfree(x->rows);
    arrfree(x->item);
    arrfree(x->text);
    arrfree(x->ids);
    if (x->f && fclose(x->f)) die(EXIT_RUN, "--eval-out %s: %s", x->path, strerror(errno));
}

// ---- answers on disk: writing
// What all rows of a run share and what changes a number of the table, as a text, malloc'd: the model, the items, the
// given options of what is asked and said that no session knows.
static char *run_of(App *a, const EvalRun *x) {
    static const char *const asked[] = { "tokenizer", "parse-special", "no-think", "ignore-eos", "n-predict" };
    Options *plain = options_like(a->o);
    char *run = NULL;
    size_t n;
    FILE *f = memory_stream(&run, &n);
    fprintf(f, "model %016llx, %d items %016llx,", (unsigned long long)app_fingerprint(a), (int)arrlen(x->item),
            (unsigned long long)x->hash);
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) write_option(a, plain, asked[i], f);
    memory_stream_close(f);
    options_free(plain);
    return run;
}

// The line of item i as row r played it, which is written in one piece to the file of the run, if it has one; exit 1
// when it cannot be. Then the row has it. Frees what was said.
static void item_done(const EvalRun *x, int i, int r, Played *played, char *cost) {
    const EvalItem *it = &x->item[i];
    const EvalRow *row = &x->rows[r];
    char *text = NULL, err[256];
    size_t size;
    FILE *f = memory_stream(&text, &size);
    fputs(answers_mark, f);
    json_print(f, "'items':%d,'item':%d,'row':%d,'budget':%d,", x->items, i + 1, r + 1, row->budget);
    json_print(f, "'run':%s,'made':%s,'method':%s,", x->run, row->made, row->side.app.method);
    json_print(f, "'model':%s,'build':%s,'answers':[", x->model, KVCOMP_VERSION);
    for (int turn = 0, k = 0; turn < (int)arrlen(it->turn); turn++) {
        if (!it->turn[turn].answers) continue;
        if (k) fputc(',', f);
        write_answer(it, turn, &played[k], f);
        free(played[k++].said);
    }
    fprintf(f, "],%s", cost);
    memory_stream_close(f);
    if (x->f && (fwrite(text, 1, size, x->f) != size || fflush(x->f)))
        die(EXIT_RUN, "--eval-out %s: %s (what was written before stays, and the run can go on)", x->path,
            strerror(errno));
    row->line[i] = json_parse(text, size, err);
    if (!row->line[i]) die(EXIT_RUN, "--eval: %s", err);
    free(text);
    free(cost);
}

// ---- answers on disk: reading
// Has obj a number, or null, by each of these names? 0, or -1 with err.
static int has_numbers(const Json *obj, const char *names, char err[512]) {
    char name[40];
    while (next_word(&names, "|", name, sizeof name)) {
        const Json *j = json_get(obj, name);
        if (!json_is(j, JSON_NUMBER) && !json_is(j, JSON_NULL)) return fault(err, "'%s' is no number", name);
    }
    return 0;
}

// The number of the row that a line belongs to, which --eval-merge takes from the first of its lines; -1: this run has
// no such row.
static int row_of_line(EvalRun *x, const Json *obj) {
    const char *made = json_text(obj, "made");
    for (int r = 0; r < (int)arrlen(x->rows); r++)
        if (!strcmp(x->rows[r].made, made)) return r;
    if (x->item) return -1;
    EvalRow row = { .made = copy_text(made), .line = xcalloc((size_t)x->items, sizeof *row.line) };
    const Json *budget = json_get(obj, "budget");
    row.budget = budget && budget->is_int ? (int)budget->i : 0;
    row.side.app.method = copy_text(json_text(obj, "method"));
    arrput(x->rows, row);
    return (int)arrlen(x->rows) - 1;
}

// Takes a line, which item_done wrote, unless it is there already, or of a row that this run has not: *line is then the
// row's, and NULL here. 0, or -1 with err.
static int line_take(EvalRun *x, Json **line, char err[512]) {
    const Json *answers = json_get(*line, "answers");
    const char *run = json_text(*line, "run");
    int item;
    if (!x->run) {
        if (read_whole(*line, "items", 1, EVAL_ITEMS, &x->items, err)) return -1;
        x->run = copy_text(run);
        snprintf(x->model, sizeof x->model, "%s", json_text(*line, "model"));
    }
    if (strcmp(run, x->run)) return fault(err, "of another run: %.200s; expected %.200s", run, x->run);
    if (read_whole(*line, "item", 1, x->items, &item, err)) return -1;
    if (!json_is(answers, JSON_ARRAY)) return fault(err, "'answers' is no list");
    int r = row_of_line(x, *line);
    Json **place = r < 0 ? NULL : &x->rows[r].line[item - 1];
    x->twice += place && *place;
    if (!place || *place) return 0;
    if (has_numbers(*line, cost_numbers, err)) return -1;
    for (int i = 0; i < answers->n; i++)
        if (has_numbers(&answers->item[i], answer_numbers, err)) return -1;
    *place = *line;
    *line = NULL;
    return 0;
}

// Reads a file of answers, text (n), which it frees. Returns the bytes up to the end of the last whole line: what
// stands behind it was interrupted, and is left out. Exit 2 with the number of a line that is none of this run.
static size_t read_answers(EvalRun *x, char *text, size_t n) {
    size_t at = 0, size = 0;
    char err[512];
    for (int line = 1, bad = 0; at < n; at += size + 1, line++) {
        const char *end = memchr(text + at, '\n', n - at);
        Json *obj = NULL;
        size = end ? (size_t)(end - text) - at : n - at;
        if (memcmp(text + at, answers_mark, min_size(size, strlen(answers_mark))))
            bad = fault(err, "none that --eval-out of this kvcomp wrote");
        if (!end && !bad) break;
        if (!bad) obj = json_parse(text + at, size, err);
        bad = !obj || line_take(x, &obj, err);
        json_free(obj);
        if (bad) die(EXIT_USAGE, "%s, line %d: %s", x->path, line, err);
    }
    free(text);
    if (at < n && !quiet) warn("%s: an interrupted line at its end: dropped", x->path);
    return at;
}

// Opens --eval-out for this run alone: the answers of a file that is there are taken, and what an interruption left at
// its end goes. Exit 2 when it is of another run.
static void answers_open(EvalRun *x, const char *path) {
    char err[512];
    size_t n;
    struct stat st;
    x->path = path;
    int fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666), there = 0;
    if (fd < 0 || fstat(fd, &st)) die(EXIT_RUN, "--eval-out %s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) die(EXIT_RUN, "--eval-out %s: is no regular file", path);
    char *text = read_bounded(path, MOST_ANSWERS, &n, err);
    if (!text) die(EXIT_RUN, "--eval-out %s", err);
    size_t whole = read_answers(x, text, n);
    x->f = ftruncate(fd, (off_t)whole) ? NULL : descriptor_stream(fd);
    if (!x->f) die(open_failure(), "--eval-out %s: %s", path, strerror(errno));
    for (int i = 0; i < x->items; i++) there += item_is_there(x, i);
    if (there && !quiet)
        fprintf(stderr, "%s: %d of %d items are there, the others are played\n", path, there, x->items);
}

// Reads all files, a path a line. Exit 2 when one cannot be read, or is of another run than the first.
static void merge_files(EvalRun *x, const char *paths) {
    char err[512], path[4096];
    size_t n;
    x->path = path;
    while (next_word(&paths, "\n", path, sizeof path)) {
        char *text = read_bounded(path, MOST_ANSWERS, &n, err);
        if (!text) die(EXIT_USAGE, "--eval-merge %s", err);
        read_answers(x, text, n);
    }
    if (x->twice && !quiet) warn("--eval-merge: %d items are there more than once; the first of each counts", x->twice);
}

// ---- the modes: dialogues
// I/N of --eval-shard: the first item, from 0, and the step to the next one. 0, or -1.
int shard_parse(const char *text, int *first, int *step) {
    long part, parts;
    int used = 0;
    if (sscanf(text, "%ld/%ld%n", &part, &parts, &used) != 2 || text[used]) return -1;
    if (part < 1 || part > parts || parts > INT_MAX) return -1;
    *first = (int)part - 1;
    *step = (int)parts;
    return 0;
}

// Shows how far a run is, which began at t0: on a terminal one line that is rewritten; elsewhere, when it
// takes long, a line at every tenth of its parts.
static void count_down(const char *parts, int done, int all, double t0) {
    int seconds = (int)((now() - t0) * (all - done) / done), terminal = isatty(2);
    int tells = terminal || (now() - t0 > 30 && done * 10 / all != (done - 1) * 10 / all);
    if (quiet || !tells) return;
    fprintf(stderr, "%s%d of %d %s, %d:%02d left", terminal ? "\r\x1b[K" : "", done, all, parts, seconds / 60,
            seconds % 60);
    fputs(!terminal ? "\n" : done == all ? "\r\x1b[K" : "", stderr);
}

// Plays the items, or those of --eval-shard, each through every row before the next one. So the
// logits of full attention are held for one item only, and what else the machine does falls on all
// rows. What is there already is not played again; what is played goes to the file x->f, if there is one.
static void play_items(const EvalRun *x) {
    const App *a = x->a;
    float *ref = NULL;                                  // stb_ds, V a row
    Played *played = NULL;                              // stb_ds, one a scored turn
    int first = 0, step = 1, done = 0;
    double t0 = now();
    Side full = { 0 };
    Options *plain = x->ids ? options_like(a->o) : NULL;        // a text's reference has none of a method's options
    if (!x->ids || x->kld) {
        side_open(&full, a, plain ? plain : a->o, "full");
        if (!full.app.s) die(EXIT_USAGE, "%s", full.refused);
    }
    options_free(plain);
    shard_parse(opt_str(a->o, "eval-shard"), &first, &step);
    step = min_int(step, x->items + 1);                 // as good, and i + step stays small
    for (int i = first; i < x->items; i += step) {
        const EvalItem *it = &x->item[i];
        arrsetlen(ref, 0);
        if (!it->ids && !item_is_there(x, i)) play_turns(&full.app, it, play_given(&full.app, it), &ref, NULL);
        arrsetlen(played, scored_turns(it));
        for (int r = 0; r < (int)arrlen(x->rows); r++) {
            App *own = &x->rows[r].side.app;
            if (x->rows[r].line[i]) continue;
            memset(played, 0, arrlenu(played) * sizeof *played);
            char *cost = it->ids ? play_window(own, it, full.app.s, played)
                                 : play_item(own, it, ref, played);
            item_done(x, i, r, played, cost);
            session_reset(own->s);                      // gives its rows back: many sessions are open
        }
        count_down("items", ++done, (x->items - first + step - 1) / step, t0);
    }
    arrfree(ref);
    arrfree(played);
    side_close(&full);
}

// Ends the program if an item with its right replies is longer than the context.
static void check_fit(const App *a, const EvalRun *x) {
    enum { TEMPLATE_TOKENS = 16 };                      // about what the chat template adds to a turn
    for (int i = 0; i < (int)arrlen(x->item); i++) {
        int need = 0;
        for (int j = 0; j < (int)arrlen(x->item[i].turn); j++) {
            const EvalTurn *t = &x->item[i].turn[j];
            int *ids = tokenizer_encode(a->tok, t->user, strlen(t->user), 0, gold_ids(a, t));
            need += (int)arrlen(ids) + TEMPLATE_TOKENS;
            arrfree(ids);
        }
        if (need > ctx_limit(a))
            die(EXIT_USAGE, "--eval: %s, item %d needs about %d tokens, the context has %d (-c)",
                x->item[i].task, i + 1, need, ctx_limit(a));
    }
}

// The file of a task of data/tasks by its name, malloc'd; NULL: there is none.
static char *task_path(const char *name) {
    char path[PROGRAM_PATH], file[160];
    snprintf(file, sizeof file, "data/tasks/%.100s.jsonl", name);
    int plain = strlen(name) <= 100 && !strchr(name, '/');
    return plain && file_exists(beside_program(file, path)) ? copy_text(path) : NULL;
}

// Reads the items of --eval A,B,..: the first --eval-items texts of tasks, by their names, and of files, by their
// paths.
static void eval_items(const App *a, const char *what, EvalRun *x) {
    static const char all[] = "needle,multiturn,coref,facts,json,fewshot,summary";
    int most = opt_int(a->o, "eval-items") ? opt_int(a->o, "eval-items") : INT_MAX;
    const char *list = strcmp(what, "all") ? what : all;
    char word[4096];
    while (next_word(&list, ",", word, sizeof word)) {
        char *path = task_path(word);
        if (!path && !file_exists(word))
            die(EXIT_USAGE, "--eval wants all, ppl, kld or a list of files and of names in data/tasks (%s, ..); "
                "found '%s'", all, word);
        read_items(x, a->tok, path ? path : word, most);
        free(path);
    }
    check_fit(a, x);
}

// Cuts a text into windows, each an item of one turn without words: the first ones, so many as --eval-items says.
static void eval_windows(const App *a, const char *path, EvalRun *x) {
    static const Json no_text = { .type = JSON_STRING, .str = "" }, no_answer = { .item = (Json *)&no_text, .n = 1 };
    enum { WINDOWS = 8 };                               // unless --eval-items says how many
    int window = opt_int(a->o, "eval-length"), most = opt_int(a->o, "eval-items");
    char err[256];
    size_t n;
    char *text = read_bounded(path, MOST_TEXT, &n, err);
    if (!text) die(EXIT_USAGE, "-f %s", err);
    x->ids = tokenizer_encode(a->tok, text, n, 0, NULL);
    free(text);
    int tokens = (int)arrlen(x->ids), windows = min_int(tokens / window, most ? most : WINDOWS);
    ids_must_have_rows(a->c, x->ids, tokens);           // their logits are read before they are fed
    if (!windows) die(EXIT_USAGE, "-f %s: %d tokens, one window needs %d (--eval-length)", path, tokens, window);
    for (int w = 0; w < windows; w++) {
        EvalItem it = { .task = "text", .number = w, .length = window, .ids = x->ids + (size_t)w * window };
        arrput(it.turn, ((EvalTurn){ .answers = &no_answer, .position = -1, .depth = -1 }));
        arrput(x->item, it);
    }
}

// ---- the run
// Prints the rows of a run.
static void print_rows(const EvalRun *run) {
    Field **table = NULL;
    for (int r = 0; r < (int)arrlen(run->rows); r++) arrput(table, row_fields(&run->rows[r], run));
    print_table(table, run->a);
}

// --eval-merge: one table from the files that the parts of a run wrote, without the model. 0, or 1
// when an item is missing.
int eval_merge(App *a) {
    EvalRun x = { .a = a };
    char text[160];
    merge_files(&x, opt_str(a->o, "eval-merge"));
    int missing = rows_end(&x, text);
    if (missing == x.items) die(EXIT_USAGE, "--eval-merge: no item is there in every row");
    if (missing)
        warn("--eval-merge: %d of %d items are missing: %s%s", missing, x.items, text, missing > 8 ? ", .." : "");
    print_rows(&x);
    eval_close(&x);
    return missing ? EXIT_RUN : 0;
}

// --eval: reads the items, plays them through every row, prints the rows and, with --report,
// has the page written. Returns 0.
int evaluate(App *a, void (*report)(App *a, const EvalRun *run)) {
    const char *path = opt_str(a->o, "file"), *what = *opt_str(a->o, "eval") ? opt_str(a->o, "eval") : "all";
    const char *out = opt_str(a->o, "eval-out");
    int kld = !strcmp(what, "kld"), ppl = kld || !strcmp(what, "ppl");
    char err[512], missing[160];
    EvalRun x = { .a = a, .kld = kld };
    double t0 = now();

    // The items
    if (ppl && !*path) die(EXIT_USAGE, "--eval %s wants -f FILE", what);
    if (!ppl && *path && !quiet) warn("without effect with --eval %s: --file", what);
    if (!ppl && opt_given(a->o, "eval-length") && !quiet) warn("without effect with --eval %s: --eval-length", what);
    if (ppl && (*out || opt_given(a->o, "eval-shard")))
        die(EXIT_USAGE, "--eval-out and --eval-shard go with dialogues, not with --eval %s", what);
    if (options_set(a->o, "temp", "0", err)) die(EXIT_RUN, "%s", err);
    if (ppl) eval_windows(a, path, &x);
    else eval_items(a, what, &x);

    // The rows
    x.rows = open_rows(a);
    x.items = (int)arrlen(x.item);
    int rows = (int)arrlen(x.rows);
    for (int r = 0; r < rows; r++) x.rows[r].line = xcalloc((size_t)x.items, sizeof *x.rows->line);
    snprintf(x.model, sizeof x.model, "%s", a->c->dir);
    if (a->trace && rows > 1) die(EXIT_USAGE, "--trace goes with one row, not with %d", rows);
    if (a->trace) {                                     // of the one row, not of the session of the App
        trace_session(a->s, NULL);
        trace_session(x.rows->side.app.s, &a->trace->trace);
        x.rows->side.app.trace = a->trace;
    }
    if (*out) x.run = run_of(a, &x);
    if (*out) answers_open(&x, out);
    play_items(&x);
    for (int r = 0; r < rows; r++) {
        session_close(x.rows[r].side.app.s);
        x.rows[r].side.app.s = NULL;
    }
    int items = x.items - rows_end(&x, missing);
    print_rows(&x);
    if (!quiet)
        fprintf(stderr, "%d rows, %d items, %d answers each, %.1f s\n", rows, items, (int)arrlen(x.rows->answer),
                now() - t0);
    if (*opt_str(a->o, "report")) report(a, &x);

    eval_close(&x);
    return 0;
}

// ==================================================================================================== CALIBRATION
// Head scores of DiliLazyKV and HeadKV (section 13): --calibrate measures them, once per model, and writes the file
// that holds them. It hides a sentence, the needle, in a long text, the hay, asks for it, and looks at the attention of
// the last prompt token and of the answer. A run is one needle at one depth. For HeadKV-R2 there is a second run, in
// which a sentence of reasoning and a wrong answer stand before the needle.

enum {
    HAY_LENGTH = 2048,          // ids of a prompt, about, where the model can hold so many
    HAY_DEPTHS = 33,            // a needle stands at 2, 5, .. 98 per cent of the hay
    HAY_ANSWER = 32,            // ids of an answer, at most
    LARGEST    = 10,            // |T|, as in the published scores
    FIRST_RUNS = 24,            // when none of them is accepted, none will be
};

// What is known of a head.
typedef struct {
    double score[SCORES];       // of one run
    double sum[SCORES];         // of the accepted ones
    int top;                    // the key with the largest weight of the row looked at last
    double mass;                // the weights of c2's keys among the |N| largest of that row
} HeadScores;

typedef struct {
    // What is gone through
    Session *s;                 // of method full, with the probe beside it
    const Tokenizer *t;
    Json *needles;              // a list of texts: question, needle, answer; for second runs distractor, reasoning
    char *frame;                // what stands around hay and question
    int *hay;                   // (stb_ds) ids
    int length;                 // ids of a prompt, about
    // One run
    int at, n;                  // N, the needle's keys: the first one, and how many
    int right;                  // the first key of c2, the right answer, which ends where N ends
    // All runs
    HeadScores *head;           // (L,H)
    int accepted;               // plain runs
    int reasoned;               // second ones
} Calibration;

// ---- needles and hay
// What is hidden, and in what, unless the user names other files: facts and sentences in plain English.
static const char own_needles[] = "data/needles.json", own_hay[] = "data/hay.txt";

// The ids of the file at `path`, or, when that is empty, of our own, as an stb_ds array. Exit 2 when they are less
// than n, or the file cannot be read.
static int *hay_ids(const Tokenizer *t, const char *path, int n) {
    char why[256], own[PROGRAM_PATH];
    size_t size;
    if (!*path) path = beside_program(own_hay, own);
    char *text = read_bounded(path, MOST_TEXT, &size, why);
    if (!text) die(EXIT_USAGE, "-f %s", why);
    int *ids = encode_at(t, text, size, 0, 1, NULL);
    free(text);
    if ((int)arrlen(ids) < n)
        die(EXIT_USAGE, "-f %s has %d tokens, %d are needed", path, (int)arrlen(ids), n);
    return ids;
}

// The needles of the file at `path`, or, when that is empty, our own. Exit 2 when it is no list of them.
static Json *needles_load(const char *path) {
    static const char *const keys[] = { "question", "needle", "answer" };
    char why[512], own[PROGRAM_PATH];
    if (!*path) path = beside_program(own_needles, own);
    Json *list = json_read(path, MOST_CONFIG, why);
    if (!list) die(EXIT_USAGE, "--calibrate-needles: %s", why);
    int bad = !json_is(list, JSON_ARRAY) || !list->n;
    for (int i = 0; i < list->n * 3 && !bad; i++) bad = !*json_text(&list->item[i / 3], keys[i % 3]);
    if (bad)
        die(EXIT_USAGE, "--calibrate-needles: %s: expected a list of {\"question\", \"needle\", \"answer\"}", path);
    return list;
}

// ---- the scores of one run

// Is the key one of the needle's?
static int in_needle(const Calibration *r, int key) { return key >= r->at && key < r->at + r->n; }

// DiliLazyKV's scores of a head from its softmax row a (n). idx (n) is room. T is chosen among all keys, those of the
// first tokens and of the question too, as in the published scores.
static void head_scores(const Calibration *r, HeadScores *x, const float *a, int n, int *idx) {
    double hit = 0, top = 0, needle = 0;                // a summed over T & N, T, N
    int k = top_k(a, n, LARGEST, idx);
    for (int i = 0; i < k; i++) {
        top += a[idx[i]];
        if (in_needle(r, idx[i])) hit += a[idx[i]];
    }
    for (int i = r->at; i < r->at + r->n; i++) needle += a[i];

    double dili = top > 1e-9 ? hit / top : 0;           // Sec. 3.1: DiliScore, a weighted precision
    double lazy = needle > 1e-9 ? hit / needle : 0;     // Sec. 3.1: LazyScore, a weighted recall
    x->score[SCORE_DILI] = dili;
    x->score[SCORE_LAZY] = lazy;
    x->score[SCORE_INF] = dili + lazy > 1e-9 ? 2 * dili * lazy / (dili + lazy) : 0;      // Eq. 1: InfScore
}

// HeadKV's part: what a head looks at in its softmax row a (n), from which the next token will be chosen. idx (n) is
// room.
static void head_look(const Calibration *r, HeadScores *x, const float *a, int n, int *idx) {
    int k = top_k(a, n, r->n, idx);
    x->top = idx[0];
    x->mass = 0;
    for (int j = 0; j < k; j++) {
        if (a[idx[j]] > a[x->top]) x->top = idx[j];
        if (idx[j] >= r->right && in_needle(r, idx[j])) x->mass += a[idx[j]];
    }
}

// HeadKV's scores: adds what the head looked at when token number `step` of the answer was chosen, which is fed now.
// copied: that token is the one at the key with the largest weight.
static void head_said(const Calibration *r, HeadScores *x, int step, int copied) {
    if (copied && in_needle(r, x->top)) x->score[SCORE_R] += 1.0 / r->n;
    if (step < r->n) x->score[SCORE_R2] += x->mass;
}

// The probe is an observer, whose state is a pointer to the Calibration.
// Hook commit of the probe: the scores of layer l's heads, from the softmax rows of the prompt's
// last token, and HeadKV's from those of the answer too. Only these rows are made, so memory grows
// with the length and not with its square.
static void head_probe_commit(Session *s, void *ms, int l, const float *q, int T) {
    Calibration *r = *(Calibration **)ms;
    if (l == s->c->L) return;
    size_t mark = scratch_mark(s);
    int N = kv_longest(s, l), H = s->c->H;
    int *idx = scratch(s, (size_t)N * sizeof(int));
    float *row = scratch(s, (size_t)H * N * sizeof(float));
    window_scores(s, l, q, T, 1, row);
    for (int h = 0; h < H; h++, row += N) {
        HeadScores *x = &r->head[l * H + h];
        if (s->decoding) head_said(r, x, s->step, s->tok[x->top].id == s->tok[s->base].id);
        else head_scores(r, x, row, N, idx);
        head_look(r, x, row, N, idx);
    }
    scratch_reset(s, mark);
}

static const Method head_probe = {
    .name   = "probe",
    .wants  = KV_QUERY,
    .state  = sizeof(Calibration *),
    .commit = head_probe_commit,
};

// ---- one run
static const char hay_mark[] = "{hay}", question_mark[] = "{question}";

// What stands around hay and question, as a text with marks in their places, malloc'd: the frame of a chat, where the
// model has a template (tp), else that of the authors' script.
static char *frame_make(const Template *tp) {
    Message m = { .role = "user", .content = "{hay} {question}" };
    char err[512];
    size_t size;
    if (!tp) return copy_text("{hay}Based on the content in the book, answer the question: {question}\nAnswer:");
    char *text = template_render(tp, &m, 1, RENDER_PROMPT, &size, NULL, err);
    if (!text) die(EXIT_MODEL, "--calibrate: %s", err);
    if (!strstr(text, m.content)) die(EXIT_MODEL, "--calibrate: the chat template leaves the message out");
    return text;
}

// Where a needle goes among n ids of hay: at the end of the sentence before depth % of them.
static int needle_place(const Calibration *r, int depth, int n) {
    int at = (int)((long)n * depth / 100), len;
    for (; at > 0; at--) {
        const char *b = tokenizer_bytes(r->t, r->hay[at - 1], &len);
        if (len && b[len - 1] == '.') break;
    }
    return at;
}

// The prompt of a run as an stb_ds array of ids: [BOS] frame, hay with the needle in it, question, frame; with
// `reasoning`, reasoning and a wrong answer stand before the needle. About 200 of its length are left for what is
// neither hay nor needle, half of a length below 400. Sets r->at, r->n and r->right. NULL: there is no room for hay.
static int *run_prompt(Calibration *r, const Json *needle, int depth, int reasoning) {
    const char *bos, *begin = strstr(r->frame, hay_mark), *ask = begin + strlen(hay_mark);
    const char *end = strstr(ask, question_mark);
    char text[8192];
    int *ids = NULL, *planted = NULL, len = 0;

    // What is planted is encoded by itself, and the right answer too, so that their ids are known exactly.
    if (reasoning) {
        snprintf(text, sizeof text, " %s %s", json_text(needle, "reasoning"), json_text(needle, "distractor"));
        planted = encode_at(r->t, text, strlen(text), 0, 0, planted);
    }
    int wrong = (int)arrlen(planted);
    snprintf(text, sizeof text, " %s", json_text(needle, "needle"));
    planted = encode_at(r->t, text, strlen(text), 0, 0, planted);
    r->n = (int)arrlen(planted);
    int n_hay = r->length - (r->length < 400 ? r->length / 2 : 200) - r->n;
    if (n_hay < 1) {
        arrfree(planted);
        return NULL;
    }

    int at = needle_place(r, depth, n_hay);
    bos = tokenizer_bytes(r->t, tokenizer_bos(r->t), &len);
    if (tokenizer_adds_bos(r->t) && !(len && !strncmp(r->frame, bos, (size_t)len))) arrput(ids, tokenizer_bos(r->t));
    ids = encode_at(r->t, r->frame, (size_t)(begin - r->frame), 1, 1, ids);
    r->at = (int)arrlen(ids) + at;
    r->right = r->at + wrong;
    ids = ids_append(ids, r->hay, at);
    ids = ids_append(ids, planted, r->n);
    ids = ids_append(ids, r->hay + at, n_hay - at);
    snprintf(text, sizeof text, "%.*s%s%s", (int)(end - ask), ask, json_text(needle, "question"),
             end + strlen(question_mark));
    arrfree(planted);
    return encode_at(r->t, text, strlen(text), 1, 0, ids);
}

// The greedy answer behind the logits of the prompt, as an stb_ds array that ends in NUL. All of it is fed, so that the
// probe sees it.
static char *greedy_answer(Calibration *r, const float *logits) {
    const Config *c = r->s->c;
    char *text = NULL;
    for (int i = 0; i < HAY_ANSWER; i++) {
        int id = argmax(logits, c->V), end = 0, len;
        for (int e = 0; e < c->n_eos; e++) end |= c->eos[e] == id;
        if (end) break;
        const char *b = tokenizer_bytes(r->t, id, &len);
        bytes_put(&text, b, (size_t)len);
        logits = decode(r->s, id);
    }
    arrput(text, 0);
    return text;
}

// The share of the answer's words that the text has, too; case and punctuation do not count.
static double word_recall(const char *answer, const char *text) {
    char **a = words_of(answer, WORDS_PLAIN), **b = words_of(text, WORDS_PLAIN);
    double n = (double)arrlen(a), same = bag_shared(a, b);
    words_free(a);
    words_free(b);
    return n > 0 ? same / n : 1;
}

// One run. It is accepted when its answer has half of the expected words; then its scores are added to the heads'
// sums: R2 in the run made for it, which is left out where it has no room, all others in the plain one. Returns 1 for
// an accepted run.
static int calibrate_run(Calibration *r, const Json *needle, int depth, int reasoning) {
    int *ids = run_prompt(r, needle, depth, reasoning);
    if (!ids && reasoning) return 0;
    if (!ids) die(EXIT_USAGE, "--calibrate: %d tokens do not hold a needle beside the question", r->length);
    int heads = r->s->c->L * r->s->c->H;
    session_reset(r->s);
    for (int i = 0; i < heads; i++) memset(r->head[i].score, 0, sizeof r->head[i].score);
    char *answer = greedy_answer(r, prefill(r->s, ids, (int)arrlen(ids)));
    int accepted = word_recall(json_text(needle, "answer"), answer) >= .5;
    arrfree(answer);
    arrfree(ids);
    for (int i = 0; i < heads && accepted; i++)
        for (int k = 0; k < SCORES; k++) r->head[i].sum[k] += (k == SCORE_R2) == reasoning ? r->head[i].score[k] : 0;
    return accepted;
}

// ---- the file

// Writes a score file: how it was made, then the means over the accepted runs; R2 only where it had any.
// The model is named by its folder's last name, because the file travels and the path does not.
static void scores_write(FILE *f, const Calibration *r) {
    const Config *c = r->s->c;
    const char *slash = strrchr(c->dir, '/'), *name = slash && slash[1] ? slash + 1 : c->dir;
    json_print(f, "{\n  'format': 'kvcomp head scores',\n  'model': %s,\n", name);
    json_print(f, "  'layers': %d, 'heads': %d, 'score': 'mass', 'k': %d, 'accept': 'recall', ", c->L, c->H, LARGEST);
    json_print(f, "'needles': %d, 'accepted': %d, 'accepted_r2': %d,\n", r->needles->n, r->accepted, r->reasoned);
    json_print(f, "  'lengths': [%d],\n  'depths': [", r->length);
    for (int i = 0; i < HAY_DEPTHS; i++) fprintf(f, "%s%d", i ? ", " : "", 2 + 3 * i);
    fprintf(f, "]");
    for (int k = 0; k < SCORES; k++) {
        int runs = k == SCORE_R2 ? r->reasoned : r->accepted;
        if (!runs) continue;
        json_print(f, ",\n  %s: {", score_names[k][0]);
        for (int i = 0; i < c->L * c->H; i++) {
            json_print(f, i ? ",\n    '%d-%d': [" : "\n    '%d-%d': [", i / c->H, i % c->H);
            json_real(f, r->head[i].sum[k] / runs, 9);
            fputc(']', f);
        }
        fprintf(f, "\n  }");
    }
    fprintf(f, "\n}\n");
}

// --calibrate OUT.json: makes the score file of a model, whose saving begins before the work, so that a bad path shows
// at once. Goes through all depths and needles, each with its second run where it has one. Returns the exit code.
int calibrate(const Config *c, const Weights *w, const Tokenizer *t, const Template *tp, const Options *o) {
    char err[512];
    Saving out;
    if (!t) die(EXIT_USAGE, "--calibrate needs the model's tokenizer");
    Calibration r = { .t = t, .length = min_int(HAY_LENGTH, c->max_pos), .frame = frame_make(tp) };
    r.needles = needles_load(opt_str(o, "calibrate-needles"));
    if (save_begin_open(&out, opt_str(o, "calibrate"), err)) die(EXIT_RUN, "--calibrate: %s", err);
    r.hay = hay_ids(t, opt_str(o, "file"), r.length);
    r.head = xcalloc((size_t)c->L * c->H, sizeof *r.head);
    r.s = session_open(c, w, o, "full");
    *(Calibration **)observe(r.s, &head_probe) = &r;

    int runs = HAY_DEPTHS * r.needles->n;
    double t0 = now();
    for (int i = 0; i < runs && (r.accepted || i < FIRST_RUNS); i++) {
        const Json *needle = &r.needles->item[i % r.needles->n];
        int depth = 2 + 3 * (i / r.needles->n);
        int twice = *json_text(needle, "distractor") && *json_text(needle, "reasoning");
        r.accepted += calibrate_run(&r, needle, depth, 0);
        if (twice) r.reasoned += calibrate_run(&r, needle, depth, 1);
        count_down("runs", i + 1, runs, t0);
    }
    if (!r.accepted) {
        save_drop(&out);
        die(EXIT_RUN, "--calibrate: the model finds nothing in %d tokens, none of its answers had half of the "
                      "expected words. Give it facts and a text that it can read: --calibrate-needles FILE (our "
                      "facts are English sentences) and -f FILE", r.length);
    }
    scores_write(out.f, &r);
    if (save_keep(&out, err)) die(EXIT_RUN, "--calibrate: %s", err);
    if (!quiet) tell("%d of %d runs accepted: %s", r.accepted, runs, opt_str(o, "calibrate"));
    session_close(r.s);
    json_free(r.needles);
    arrfree(r.hay);
    free(r.frame);
    free(r.head);
    return EXIT_OK;
}

// ==================================================================================================== BENCHMARK
// --bench measures a model, or random weights of a shape (--synthetic): prefill ("pp N": N ids from
// an empty cache) and decode ("tg at D": one token with D rows behind it). A decode step is bytes:
// weights, the K and V rows attention reads, and the method's index; gb_s says how many of them a second. On a
// GPU the bytes that it copies a second stand beside, measured again before every line, so that the share says
// how far from the roofline a step is, whatever else the machine is doing. A deep cache is filled with
// random rows instead of a prefill: only the speed of the layers' products is skipped, every hook
// of the method runs.

// LoopServe chooses rows first at its 16th step and then every 16. By default a repetition is
// therefore one whole cycle of it, and 16 steps of the methods that choose at every step.
enum {
    BENCH_WARM = 16,        // decode steps before the clock starts
    BENCH_STEPS = 16,       // decode steps of one repetition
    BENCH_PICKS = 40,       // logits that a step brings from a device: as in a reply with the usual --top-k
};

// ---- measuring
// Stands in for forward while a cache is filled: T random rows in every head, then the hooks of the
// method, no products.
static float *fill_pass(Session *s, const Token *in, int T) {
    const Config *c = s->c;
    size_t nk = (size_t)T * c->G * c->D, nq = (size_t)T * c->H * c->D, n = nq + 2 * nk;
    float *x = xmalloc(n * sizeof *x);      // q (T,H,D), k (T,G,D), v (T,G,D)
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) x[i] = (float)(int32_t)(uint32_t)mix64(i) * 0x1p-31f;
    float *q = KV_DEV(s) ? device_floats(x, n) : x;         // where the device, if any, has them
    const float *k = q + nq, *v = k + nk;
    add_tokens(s, in, T);
    if (KV_DEV(s)) tokens_give_cuda(s);
    for (int l = 0; l < c->L; l++) {
        int acts = layer_acts(s, l);
        if (acts)
            EACH_HOOK(s, p, project) p->m->project(s, p->ms, l, q, k, v, 0, T);
        kv_append(s, l, k, v, 0, T);
        if (acts)
            EACH_HOOK(s, p, commit) p->m->commit(s, p->ms, l, q, T);
    }
    EACH_HOOK(s, p, commit) p->m->commit(s, p->ms, c->L, NULL, T);
    if (KV_DEV(s)) device_drop(q);
    free(x);
    return s->logits;
}

// The median of x (n), which is sorted; of an even number the mean of the middle two.
static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, double_order);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

// A cache of `depth` random rows a head (at least 1 real one), and the steps before the clock
// starts.
static void fill_cache(Session *s, int depth) {
    int n = max_int(depth, 1), *ids = random_ids(n, s->c->V);
    session_reset(s);
    s->picks = BENCH_PICKS;
    if (depth) s->forward = fill_pass;
    prefill(s, ids, n);
    s->forward = forward;
    for (int i = 0; i < BENCH_WARM; i++) decode(s, ids[0]);
    memset(&s->clk, 0, sizeof s->clk);
    arrfree(ids);
}

// A line of the table (stb_ds), measured `repeat` times, of which the median counts: the prefill of n ids into an empty
// cache; or decode behind n rows, BENCH_STEPS steps each time, which all go on in the same dialogue. Bytes are those of
// a step: a prefill is not bound by them. Milliseconds a token say where the time went, of a prefill that of the last.
static Field *bench_line(Session *s, int decodes, int n, int repeat) {
    double *seconds = xmalloc((size_t)repeat * sizeof *seconds);
    double kv = NAN, index = NAN, copy = NAN;           // not known of a prefill, or on a CPU
    int *ids = random_ids(max_int(n, 1), s->c->V);
    uint64_t steps = 0;
    Field *c = NULL;
    if (decodes) fill_cache(s, n);
    if (KV_DEV(s)) copy = device_copy_rate() * 1e-9;
    for (int r = 0; r < repeat; r++) {
        if (!decodes) session_reset(s);
        double t = decodes ? s->clk.decode : 0;
        if (!decodes) prefill(s, ids, n);
        for (int i = 0; i < BENCH_STEPS && decodes; i++) decode(s, (int)(mix64(steps++) % (uint64_t)s->c->V));
        seconds[r] = (decodes ? s->clk.decode : s->clk.prefill) - t;
    }
    if (decodes) {
        kv = bytes_a_step(s);
        index = 0;
        EACH_PART(s, p) {
            if (p->m->bytes) index += (double)p->m->bytes(s, p->ms);
        }
    }

    double tok_s = (decodes ? BENCH_STEPS : n) / median(seconds, repeat), tokens = decodes ? (double)s->clk.steps : n;
    double weights = decodes ? (double)s->w->bytes : NAN;       // of an embedding that is not the output a row is read
    if (s->w->head.data != s->w->embed.data) weights -= (double)tensor_bytes(&s->w->embed);
    double gb_s = (weights + kv + index) * tok_s * 1e-9;
    add_field(&c, 1, "n", n, decodes ? "tg at %.0f" : "pp %.0f");
    add_field(&c, 1, "tok_s", tok_s, "%.2f");
    add_field(&c, 1, "weight_bytes", weights, NULL);
    add_field(&c, 1, "kv_bytes_attended", kv, NULL);
    add_field(&c, 1, "index_bytes", index, NULL);
    add_field(&c, 1, "gb_s", gb_s, "%.1f");
    add_field(&c, 1, "read_gb_s", copy, "%.1f");
    add_field(&c, 1, "share", gb_s / copy, "%.3f");
    add_field(&c, 1, "attend_ms", s->clk.attend * 1e3 / tokens, "%.3f");
    add_field(&c, 1, "select_ms", s->clk.select * 1e3 / tokens, "%.3f");
    add_field(&c, 1, "commit_ms", s->clk.commit * 1e3 / tokens, "%.3f");
    add_field(&c, 1, "index_ms", s->clk.index * 1e3 / tokens, "%.3f");
    add_field(&c, 1, "kv_bytes_stored", (double)kv_bytes(s), NULL);
    add_word(&c, 0, "test", decodes ? "tg" : "pp");
    add_word(&c, 0, "method", opt_str(s->opt, "method"));
    add_word(&c, 0, "model", s->c->dir);
    add_field(&c, 0, "threads", n_threads(), "%.0f");
    add_word(&c, 0, "simd", simd_name());
    arrfree(ids);
    free(seconds);
    return c;
}

// ---- --bench
// The mode --bench: opens the model and prints the table of one method; what is measured stands above it. Returns the
// exit code.
int bench(Options *o) {
    App a = { .o = o };
    const char *method = opt_str(o, "method");
    int *prompt = number_list("bench-prompts", opt_str(o, "bench-prompts"), 1, 1 << 24);
    int *depth = number_list("bench-depths", opt_str(o, "bench-depths"), 0, 1 << 24);
    int repeat = opt_int(o, "repeat"), prompts = (int)arrlen(prompt), lines = prompts + (int)arrlen(depth), longest = 0;
    char text[16], err[256];
    Field **table = NULL;

    // The memory plan is told, through -c, the longest context there will be
    for (int i = 0; i < lines; i++) longest = max_int(longest, i < prompts ? prompt[i] : depth[i - prompts]);
    snprintf(text, sizeof text, "%d", longest + 1 + BENCH_WARM + BENCH_STEPS * repeat);
    options_set(o, "ctx-size", text, err);
    open_model(&a);
    choose_device(&a);
    Session *s = session_open(a.c, a.w, o, method);

    double t0 = now();
    if (!opt_int(o, "json") && !opt_int(o, "csv"))
        printf("%s, %s weights (%.2f GB), method %s, K %s, V %s, %d threads, %s\n\n", a.c->dir, dtype_name(a.c->dtype),
               (double)a.w->bytes * 1e-9, method, opt_str(o, "ctk"), opt_str(o, "ctv"), n_threads(), simd_name());
    for (int i = 0; i < lines; i++) {
        arrput(table, bench_line(s, i >= prompts, i < prompts ? prompt[i] : depth[i - prompts], repeat));
        count_down("lines", i + 1, lines, t0);
    }
    print_table(table, &a);
    session_close(s);
    weights_close(a.w, a.c);
    arrfree(prompt);
    arrfree(depth);
    return 0;
}
