// app/chat.c - opening a model, the record of a dialogue, replies, the chat.
#define _GNU_SOURCE
#include "chat.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// ==================================================================================================== GENERATION AND RECORDS
// An App is what the command line opened: a model, a tokenizer, a template, one session, and the
// record of its turns. The record is the whole dialogue as ids. Because a session computes the same
// bits for the same ids, the record is enough to make a dialogue anew: /method, /regen, /load and
// --session all replay it from an empty cache. stdout gets generated text or the asked-for result;
// everything else goes to stderr.

// Is the turn that is being made to end?
static int stop_asked(void) { return interrupts || leaving; }

// ---- sampling: top-k, top-p, min-p, temperature, in this order
// A CPU session has all logits at hand. On a device the largest are looked for there, and only those
// that sampling may draw come to the host, which goes on with them as it does with a CPU's: the same
// random number draws the same id.

// Order for qsort: larger logits first, equal ones by id.
static int cand_order(const void *a, const void *b) {
    const Cand *p = a, *q = b;
    if (p->x == q->x) return p->id - q->id;
    return p->x < q->x ? 1 : -1;
}

int argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

// How many of the largest logits sampling looks at, 0: at all of them, or at more than a device brings.
static int logits_needed(const Options *o) {
    int k = opt_real(o, "temp") > 0 ? opt_int(o, "top-k") : 1;
    return k <= MAX_BEST ? k : 0;
}

// The candidates that --top-k leaves, the best first, in scratch memory; *n: how many they are. A device has picked
// them already.
static Cand *sampled_candidates(App *a, int *n) {
    const BestLogits *picked = a->s->picked;
    int V = a->c->V, k = opt_int(a->o, "top-k"), *idx = picked ? NULL : scratch(a->s, (size_t)V * sizeof *idx);
    *n = picked ? picked->n : top_k(a->s->logits, V, k > 0 ? k : V, idx);
    Cand *c = scratch(a->s, (size_t)*n * sizeof *c);
    for (int i = 0; i < *n; i++) c[i] = picked ? picked->best[i] : (Cand){ a->s->logits[idx[i]], idx[i] };
    qsort(c, *n, sizeof *c, cand_order);
    return c;
}

// How many of the n sorted candidates stay. --top-p: the fewest whose probabilities sum to top_p.
// --min-p: those with at least min_p times the probability of the best. The best always stays.
static int probable_candidates(const Cand *c, int n, double top_p, double min_p) {
    double sum = 0, seen = 0;
    float top = c[0].x;
    for (int i = 0; i < n; i++) sum += exp(c[i].x - top);
    int keep = 0;
    for (; keep < n; keep++) {
        double weight = exp(c[keep].x - top);
        if (keep && (seen >= top_p || weight < min_p)) break;
        seen += weight / sum;
    }
    return keep;
}

// --temp 0 takes the largest logit and leaves the random numbers alone. Else one of the candidates is drawn, with
// probability proportional to exp(logit / temp).
int sample(App *a) {
    double temp = opt_real(a->o, "temp"), sum = 0;
    const BestLogits *picked = a->s->picked;
    if (temp <= 0) return picked ? picked->best->id : argmax(a->s->logits, a->c->V);
    size_t mark = scratch_mark(a->s);
    int n, pick = 0;
    const Cand *c = sampled_candidates(a, &n);
    n = probable_candidates(c, n, opt_real(a->o, "top-p"), opt_real(a->o, "min-p"));
    for (int i = 0; i < n; i++) sum += exp((c[i].x - c->x) / temp);
    double r = (double)(splitmix64(&a->rng) >> 11) / 9007199254740992.0 * sum;     // 53 bits: uniform in [0,sum)
    for (; pick < n - 1; pick++) {
        r -= exp((c[pick].x - c->x) / temp);
        if (r < 0) break;
    }
    int id = c[pick].id;
    scratch_reset(a->s, mark);
    return id;
}

// ---- the record
void turn_free(Turn t) {
    arrfree(t.pre);
    arrfree(t.dec);
    free(t.user);
    free(t.reply);
}

void turns_free(Turn *turns) {
    while (arrlen(turns)) turn_free(arrpop(turns));
    arrfree(turns);
}

int *ids_append(int *to, const int *ids, int n) {
    if (n > 0) memcpy(arraddnptr(to, n), ids, (size_t)n * sizeof *ids);
    return to;
}

Turn turn_copy(const Turn *from, int n_dec) {
    Turn t = *from;
    t.pre = ids_append(NULL, from->pre, (int)arrlen(from->pre));
    t.dec = ids_append(NULL, from->dec, n_dec);
    t.user = from->user ? copy_text(from->user) : NULL;
    t.reply = from->reply ? copy_text(from->reply) : NULL;
    return t;
}

Turn *turns_copy(const Turn *turns) {
    Turn *copy = NULL;
    for (int i = 0; i < (int)arrlen(turns); i++) arrput(copy, turn_copy(&turns[i], (int)arrlen(turns[i].dec)));
    return copy;
}

int *record_ids(const Turn *turns) {
    int *ids = NULL;
    for (int i = 0; i < (int)arrlen(turns); i++) {
        ids = ids_append(ids, turns[i].pre, (int)arrlen(turns[i].pre));
        ids = ids_append(ids, turns[i].dec, (int)arrlen(turns[i].dec));
    }
    return ids;
}

void record_clear(App *a) {
    turns_free(a->turn);
    a->turn = NULL;
}

Message *messages_of_json(const Json *list, char err[512]) {
    int n = json_is(list, JSON_ARRAY) ? list->n : 0, bad = n ? 0 : fault(err, "no 'messages', or none in it");
    int from = n && !strcmp(json_text(&list->item[0], "role"), "system");
    Message *m = NULL;
    for (int i = 0; i < n && !bad; i++) {
        const Json *words = json_get(&list->item[i], "content");
        const char *role = json_text(&list->item[i], "role");
        const char *want = i < from ? "system" : (i - from) % 2 ? "assistant" : "user";
        int none = json_none(words) && *want == 'a';
        if (strcmp(role, want)) bad = fault(err, "message %d: expected role %s, found '%.40s'", i + 1, want, role);
        else if (!none && (!json_is(words, JSON_STRING) || strlen(words->str) != words->len))
            bad = fault(err, "message %d: 'content' is no text", i + 1);
        arrput(m, ((Message){ .role = role, .content = bad || none ? "" : words->str }));
    }
    if (bad) arrfree(m);
    return m;
}

// ---- the next turn, as the chat template writes it
// The template writes the whole dialogue each time. What has been fed stands at the beginning of it, because a
// reply that the template leaves whole is there with the ids that the model made; the rest is the new turn.
// Some templates write earlier messages otherwise once others follow: Qwen3 and R1 drop the thoughts of old
// replies, Mistral moves the system text. Then the new turn begins where the two part.

char *reply_text(const App *a, const Turn *t) {
    Decoder d = { .t = a->tok, .skip_special = 1 };
    char *text = NULL;
    if (t->reply) return copy_text(t->reply);
    for (int i = 0; i < (int)arrlen(t->dec); i++) text = decode_token(&d, t->dec[i], text);
    text = decode_flush(&d, text);
    char *copy = copy_bytes(text ? text : "", arrlenu(text));
    arrfree(text);
    return copy;
}

// How many ids two lists begin with alike.
static int same_beginning(const int *x, const int *y) {
    int n = min_int((int)arrlen(x), (int)arrlen(y)), k = 0;
    while (k < n && x[k] == y[k]) k++;
    return k;
}

// The same at their ends.
static int same_end(const int *x, const int *y) {
    int n = (int)arrlen(x), m = (int)arrlen(y), k = 0;
    while (k < n && k < m && x[n - 1 - k] == y[m - 1 - k]) k++;
    return k;
}

// The messages of the record and then `text` (stb_ds array); the replies' texts are to be freed. An empty --system
// asks for none, and takes the place of the template's own.
static Message *record_messages(const App *a, const char *text) {
    Message *m = NULL;
    const char *system = opt_given(a->o, "system") ? opt_str(a->o, "system") : NULL;
    if (system && (*system || a->tp->own_system)) arrput(m, ((Message){ .role = "system", .content = system }));
    for (int i = 0; i < (int)arrlen(a->turn); i++) {
        const Turn *t = &a->turn[i];
        arrput(m, ((Message){ .role = "user", .content = t->user ? t->user : "" }));
        arrput(m, ((Message){ .role = "assistant", .content = reply_text(a, t), .ids = t->reply ? NULL : t->dec }));
    }
    arrput(m, ((Message){ .role = "user", .content = text }));
    return m;
}

// How many ids `all` begins with alike as the dialogue of n messages does.
static int begins_like(const App *a, const int *all, const Message *m, int n, int how) {
    char err[512];
    int *ids = template_ids(a->tp, m, n, how, err), same = same_beginning(all, ids);
    arrfree(ids);
    return same;
}

// The parts of a new turn t, whose dialogue is `all`: what a dialogue that lacks something has not.
//   n_head: what is not there when no reply is opened; or, when that is nothing, what follows the words
//   n_foot: what is there without the new message
//   n_sys:  what is there with the system message alone; without one, what another system text has not
static void turn_parts(const App *a, Turn *t, Message *m, const int *all, int how) {
    char err[512];
    int n = (int)arrlen(m), total = (int)arrlen(all), fed = total - (int)arrlen(t->pre), closed = how & ~RENDER_PROMPT;
    const char *words = m[n - 1].content;
    t->n_head = total - begins_like(a, all, m, n, closed);
    if (!t->n_head) {                       // the same dialogue with other words at its end
        m[n - 1].content = *words && words[strlen(words) - 1] == 'a' ? "b" : "a";
        int *other = template_ids(a->tp, m, n, how, err);
        m[n - 1].content = words;
        t->n_head = same_end(all, other);
        arrfree(other);
    }
    t->n_head = min_int(t->n_head, (int)arrlen(t->pre));

    if (arrlen(a->turn)) {
        t->n_foot = max_int(begins_like(a, all, m, n - 1, closed) - fed, 0);
    } else if (!strcmp(m->role, "system")) {
        t->n_sys = begins_like(a, all, m, 1, closed);
        m[n - 1].content = *words == 'a' ? "b" : "a";
        if (t->n_sys <= 1) t->n_sys = begins_like(a, all, m, n, how);       // it stands inside the first message
        m[n - 1].content = words;
    } else {
        t->n_sys = all[0] == tokenizer_bos(a->tok);
        if (a->tp->no_system) return;
        Message other[2] = { { .role = "system", .content = "kvcomp" }, m[0] };
        int *both = template_ids(a->tp, other, 2, how, err);
        int own = (int)arrlen(both) - begins_like(a, both, other, 1, closed);   // ids of the message, in both dialogues
        if (own <= total && same_end(all, both) >= own) t->n_sys = total - own;
        arrfree(both);
    }
}

int render_how(const App *a) {
    return RENDER_PROMPT | (opt_int(a->o, "no-think") ? RENDER_NO_THINK : 0)
         | (opt_int(a->o, "parse-special") ? RENDER_TRUST : 0);
}

Turn render_turn(const App *a, const char *text, char err[512]) {
    Turn t = { .user = copy_text(text) };
    *err = 0;
    if (!a->tp) {
        if (!arrlen(a->turn) && tokenizer_adds_bos(a->tok)) arrput(t.pre, tokenizer_bos(a->tok));
        t.pre = tokenizer_encode(a->tok, text, strlen(text), opt_int(a->o, "parse-special"), t.pre);
        return t;
    }
    Message *m = record_messages(a, text);
    int how = render_how(a), n = (int)arrlen(m), *fed = record_ids(a->turn);

    // First as transformers has it, all of it encoded at once; else with the replies' own ids.
    int *all = NULL, same = -1;
    for (int own = 0; own < 2 && same < (int)arrlen(fed) && !*err; own++) {
        for (int i = 0; i < n; i++) m[i].n_ids = own ? (int)arrlen(m[i].ids) : 0;
        arrfree(all);
        all = template_ids(a->tp, m, n, how, err);
        same = same_beginning(all, fed);
    }
    t.back = (int)arrlen(fed) - same;
    if (all) t.pre = ids_append(NULL, all + same, (int)arrlen(all) - same);
    if (arrlen(t.pre)) turn_parts(a, &t, m, all, how);
    else if (all) fault(err, "the chat template writes nothing for this message");
    for (int i = 0; i < n; i++)
        if (!strcmp(m[i].role, "assistant")) free((char *)m[i].content);
    arrfree(m);
    arrfree(fed);
    arrfree(all);
    return t;
}

void record_take_back(App *a, Turn *t) {
    for (int i = (int)arrlen(a->turn) - 1; t->back > 0 && i >= 0; i--) {
        Turn *old = &a->turn[i];
        int n = (int)arrlen(old->pre), m = (int)arrlen(old->dec), decoded = min_int(t->back, m);
        int left = max_int(n + decoded - t->back, 0);
        if (!old->reply) old->reply = reply_text(a, old);
        if (m) arrsetlen(old->dec, m - decoded);
        if (n) arrsetlen(old->pre, left);
        old->n_head = max_int(old->n_head - (n - left), 0);
        old->n_sys = min_int(old->n_sys, left);
        old->n_foot = min_int(old->n_foot, left);
        t->back -= decoded + n - left;
    }
    t->back = 0;
}

void feed_prefill(App *a, const Turn *t) {
    double t0 = now();
    if (!arrlen(t->pre)) return;            // a turn whose ids the template has moved into a later one
    a->s->n_sys = t->n_sys;
    a->s->n_foot = t->n_foot;
    a->s->n_head = t->n_head;
    progress("prefill", 0);
    prefill(a->s, t->pre, (int)arrlen(t->pre));
    progress("prefill", 1);
    a->ttft = now() - t0;
}

// Does the session hold nothing but its rows? Then forgetting the newest rows undoes a prefill to
// the bit. A method with hooks of its own may have dropped old rows meanwhile, or counted.
static int holds_rows_only(const Session *s) {
    if (KV_DEV(s)) return 0;
    for (int i = 0; i < s->n_part; i++) {
        const Method *m = s->part[i].m;
        if (m->turn || m->enter || m->project || m->attend || m->select || m->commit) return 0;
    }
    return 1;
}

// The session forgets all but its first n_tok tokens. Where that cannot be done exactly it is emptied, and made
// again from the record when it is needed.
static void session_cut(App *a, int n_tok) {
    if (holds_rows_only(a->s)) {
        kv_truncate(a->s, n_tok);
    } else {
        (void)session_try_reset(a->s);  // if that fails now, replay tries again and says why
        a->stale = 1;
    }
}

// The prefill of a new turn, which Ctrl-C and signals can end within a layer. 0, or -1: it was
// ended, and session and record are what they were.
static int feed_message(App *a, const Turn *t) {
    const int n_tok = a->s->n_tok;
    const size_t mark = scratch_mark(a->s);
    const Clock clk = a->s->clk;
    jmp_buf stop;
    if (!setjmp(stop)) {
        a->s->unwanted = stop_asked;
        a->s->stop = &stop;
        feed_prefill(a, t);
        a->s->stop = NULL;
        return 0;
    }
    a->s->stop = NULL;
    progress("prefill", 1);
    scratch_reset(a->s, mark);
    free(a->s->coming);
    a->s->coming = NULL;
    session_cut(a, n_tok);
    if (!a->stale) a->s->clk = clk;
    return -1;
}

// The same method gives the same bits, and what a full context did then, it does again. -1: the method does not open
// again, and the session is as it was, or the record does not fit, and the session waits to be made from one that does.
int replay(App *a, char err[512]) {
    char why[512];
    if (session_try_reset(a->s)) return fault(err, "%s", a->s->err);
    a->stale = 0;
    for (int i = 0; i < (int)arrlen(a->turn) && !a->stale; i++) {
        const Turn *t = &a->turn[i];
        a->stale = make_room(a, (int)arrlen(t->pre), a->s->pos_extra, why) != 0;
        if (!a->stale) feed_prefill(a, t);
        for (int j = 0; j < (int)arrlen(t->dec) && !a->stale; j++) {
            a->stale = make_room(a, 1, 0, why) != 0;
            if (!a->stale) decode(a->s, t->dec[j]);
        }
    }
    return a->stale ? fault(err, "the dialogue is longer than fits: %.400s", why) : 0;
}

// Makes the session from the record if it was emptied (session_cut). 0, or -1 with a->err.
static int session_ready(App *a) { return a->stale ? replay(a, a->err) : 0; }

int session_take_back(App *a, Turn *t, char err[512]) {
    int n = t->back;
    record_take_back(a, t);
    if (n && !a->stale) session_cut(a, a->s->n_tok - n);
    return a->stale ? replay(a, err) : 0;
}

// ---- generating a reply
int ctx_limit(const App *a) {
    int c = opt_int(a->o, "ctx-size");
    return c ? c : a->c->max_pos;
}

// The rows of the longest head of any layer.
static int rows_held(const App *a) {
    int n = 0;
    for (int l = 0; l < a->c->L; l++) n = max_int(n, kv_longest(a->s, l));
    return n;
}

// The rows that are needed at once for n tokens more. Under --chunk a method that drops rows needs room
// for one chunk beside its budget.
static int rows_coming(const App *a, int n) {
    int chunk = a->s->chunk;
    if (!chunk || !session_evicts(a->s) || a->s->ratio >= 0) return n;
    return min_int(n, chunk + max_int(a->s->budget - rows_held(a), 0));
}

// Nothing is dropped for n tokens that would not fit then either: they are refused, and a replay of the dialogue, which
// knows nothing of them, must drop what was dropped.
int make_room(const App *a, int n, int extra, char err[512]) {
    const Session *s = a->s;
    int least = s->ratio >= 0 ? 0 : min_int(rows_held(a), s->budget);
    int fits = least + (s->chunk ? min_int(n, s->chunk) : n) <= ctx_limit(a);
    while (fits && rows_held(a) + rows_coming(a, n) > ctx_limit(a)) fits = session_compress(a->s) > 0;
    if (!fits)
        return fault(err, "%d tokens do not fit: %d rows held, -c %d (a larger -c, or a method that drops rows, has "
                     "room)", n, rows_held(a), ctx_limit(a));
    if (pos_fits(s, n, extra)) return 0;
    return fault(err, "%d tokens do not fit: the next position is %d, %s goes to max_position_embeddings %d (another "
                 "/method goes on)", n, s->pos_next, a->method, s->pos_end);
}

// Does id end a reply? Ids of the config, of the tokenizer and of the template do, unless
// --ignore-eos.
static int is_stop(const App *a, int id) {
    if (opt_int(a->o, "ignore-eos")) return 0;
    for (int i = 0; i < a->c->n_eos; i++)
        if (a->c->eos[i] == id) return 1;
    for (int i = 0; a->tp && i < (int)arrlen(a->tp->stop); i++)
        if (a->tp->stop[i] == id) return 1;
    return a->tok && tokenizer_eos(a->tok) == id;
}

// Writes the bytes of the stb_ds array *text at once, so that they are seen while the reply goes
// on, and empties it. A terminal gets the control characters in them shown, because it would obey
// them; a file or a pipe gets the bytes. out NULL: nobody does.
static void write_text(char **text, FILE *out) {
    size_t n = arrlenu(*text);
    if (out && n && isatty(fileno(out))) show(out, *text, n);
    else if (out && n) fwrite(*text, 1, n, out);
    if (out) fflush(out);
    arrsetlen(*text, 0);
}

// What is shown is also fed, counted and recorded, so there must be room for it.
int reply_next(App *a) {
    char err[512];
    int id = sample(a), stops = is_stop(a, id);
    if (!stops && !make_room(a, 1, 0, err)) return id;
    a->finish = stops ? "stop" : "context";
    if (!stops) fputc('\n', stderr);
    if (!stops) warn("the context is full: %s", err);
    return -1;
}

int stop_place(const char **stop, const char *text, size_t n) {
    int first = -1;
    for (int i = 0; i < (int)arrlen(stop); i++) {
        const char *at = n ? memmem(text, n, stop[i], strlen(stop[i])) : NULL;
        if (at && (first < 0 || at - text < first)) first = (int)(at - text);
    }
    return first;
}

// Its ids go into the record's last turn; the stop id is neither fed nor recorded, a stop text is both.
int generate(App *a, int n, FILE *out) {
    int made = 0, id;
    Decoder d = { .t = a->tok, .skip_special = 1 };
    Wrap w = { .cols = out == stdout && isatty(1) ? screen_columns() : 0 };      // on a terminal lines are broken
    char *text = NULL, *said = NULL;        // said: all of the text so far, where a text may end it
    a->s->picks = logits_needed(a->o);
    for (a->finish = NULL; !a->finish; made++) {
        if (n >= 0 && made >= n) a->finish = "length";
        else if (stop_asked()) a->finish = "interrupt";
        if (a->finish || (id = reply_next(a)) < 0) break;
        if (a->tok) text = decode_token(&d, id, text);
        if (a->stop) bytes_put(&said, text, arrlenu(text));
        if (stop_place(a->stop, said, arrlenu(said)) >= 0) a->finish = "stop";
        wrap_text(&w, &text, 0);
        write_text(&text, out);
        arrput(arrlast(a->turn).dec, id);
        decode(a->s, id);
    }
    a->s->picks = 0;
    text = decode_flush(&d, text);
    wrap_text(&w, &text, 1);
    write_text(&text, out);
    arrfree(w.word);
    arrfree(text);
    arrfree(said);
    return made;
}

// ---- results: what the numbers mean
double rate(long n, double seconds) { return seconds > 0 ? (double)n / seconds : 0; }

double bytes_a_step(const Session *s) {
    return s->clk.steps ? s->clk.bytes_attended / (double)s->clk.steps : 0;
}

// What the method is for: "memory"; or, where every row stays stored as it came, "reads" (or prefill work), or
// "nothing".
static const char *what_is_saved(const Session *s) {
    int role = 0, memory = 0;
    for (int i = 0; i < s->n_part; i++) {
        const Method *m = s->part[i].m;
        role |= m->role;
        memory |= m->evicts || m->role & ROLE_STORE;
    }
    if (memory) return "memory";
    return role ? "reads" : "nothing";
}

Words human_bytes(double n) {
    const char *unit[] = { "B", "KB", "MB", "GB", "TB" };
    Words out;
    int i = 0;
    for (; n >= 1000 && i < 4; i++) n /= 1000;
    snprintf(out.text, sizeof out.text, i && n < 100 ? "%.1f %s" : "%.0f %s", n, unit[i]);
    return out;
}

// ---- results as JSON (--json)
void json_real(FILE *f, double x, int digits) {
    char text[400];
    if (!isfinite(x)) {
        fputs("null", f);
        return;
    }
    int point = x ? (int)floor(log10(fabs(x))) : 0;         // digits before the decimal point, less one
    snprintf(text, sizeof text, "%.*f", min_int(max_int(digits - 1 - point, 0), 60), x);
    size_t n = strlen(text);
    while (strchr(text, '.') && text[n - 1] == '0') text[--n] = 0;
    if (text[n - 1] == '.') text[--n] = 0;
    fputs(strcmp(text, "-0") ? text : "0", f);
}

void json_options(const App *a, FILE *f) {
    json_print(f, "'options':{");
    for (int i = 0; i < (int)shlen(a->o->given); i++)
        json_print(f, i ? ",%s:%s" : "%s:%s", a->o->given[i].key, opt_str(a->o, a->o->given[i].key));
    fputc('}', f);
}

// A list of n numbers.
static void json_list(FILE *f, const int *x, int n) {
    fputc('[', f);
    for (int i = 0; i < n; i++) fprintf(f, "%s%d", i ? "," : "", x[i]);
    fputc(']', f);
}

void write_ids(FILE *f, const int *ids) {
    json_print(f, "'ids':");
    json_list(f, ids, (int)arrlen(ids));
}

// ,"rows": [layer][KV head] = the source tokens of the rows held. ,"views": [layer][query head] = the row numbers that
// the last decode step read: idx, and every row from tail on. An empty idx with tail 0 is every row.
void json_rows(const Session *s, FILE *f) {
    int G = s->c->G, H = s->c->H;
    fprintf(f, ",\"rows\":[");
    for (int i = 0; i < s->c->L * G; i++) {
        fputs(i % G ? "," : i ? "],[" : "[", f);
        json_list(f, s->head[i].src, s->head[i].len);
    }
    fprintf(f, "]],\"views\":[");
    for (int i = 0; i < s->c->L * H; i++) {
        const View w = *kv_view(s, i / H, i % H);
        fprintf(f, "%s{\"tail\":%d,\"idx\":", i % H ? "," : i ? "],[" : "[", w.tail);
        json_list(f, w.idx, w.n);
        fputc('}', f);
    }
    fprintf(f, "]]");
}

// Tokens of the session, tokens a second, and milliseconds to the last prefill's logits. Bytes of the cache: held, what
// full attention would hold, read in a decode step, of indexes and views, held at most; and of the rooms of passes in
// the host's memory.
void json_numbers(const App *a, FILE *f) {
    const Session *s = a->s;
    const Clock *k = &s->clk;
    json_print(f, "'n_prompt':%ld,'n_gen':%ld,", k->n_prefill, k->n_decode);
    json_print(f, "'pp_tok_s':%.3f,'tg_tok_s':%.3f,", rate(k->n_prefill, k->prefill), rate(k->n_decode, k->decode));
    json_print(f, "'ttft_ms':%.3f,", 1e3 * a->ttft);
    json_print(f, "'kv_bytes_stored':%zu,'kv_bytes_full':%zu,", kv_bytes(s), kv_bytes_full(s));
    json_print(f, "'kv_bytes_attended':%.0f,'meta_bytes':%zu,", bytes_a_step(s), kv_meta_bytes(s));
    json_print(f, "'kv_bytes_peak':%zu,'pass_bytes':%zu,", k->peak, arena_bytes(s->scratch));
}

void print_json(const App *a, const char *text) {
    FILE *f = stdout;
    const Session *s = a->s;
    const Clock *k = &s->clk;
    json_print(f, "{'method':%s,'budget':%d,", a->method, s->turn ? s->applied : budget_now(s));
    json_print(f, "'model':%s,'dtype':%s,", a->c->dir, dtype_name(a->c->dtype));
    json_print(f, "'device':%s,'saves':%s,", s->dev ? "cuda" : "cpu", what_is_saved(s));
    json_numbers(a, f);
    json_print(f, "'attend_s':%.6f,'select_s':%.6f,", k->attend, k->select);
    json_print(f, "'commit_s':%.6f,'index_s':%.6f,", k->commit, k->index);
    json_print(f, "'seed':%d,'simd':%s,'build':%s,", opt_int(a->o, "seed"), simd_name(), KVCOMP_VERSION);
    if (text) json_print(f, "'text':%s,", text);
    json_options(a, f);
    if (opt_int(a->o, "json-rows")) json_rows(s, f);
    fprintf(f, "}\n");
    fflush(f);
}

// ---- results for people
int uses_budget(const Session *s) {
    int uses = 0;
    for (int i = 0; i < s->n_part; i++) uses |= s->part[i].m->budget > 0;
    return uses;
}

int tokens_said(const Session *s) {
    int n = 0;
    for (int t = 0; t < s->n_tok; t++) n += s->tok[t].kind != TOK_EXTRA;
    return n;
}

// The rows that are held as words: "73 of 336 rows a head", "12..90 of 336 rows a head", "all 336 rows a head", and
// what is to be said of that. Rows over the budget of a method that drops rows when a prefill ends came behind it.
void rows_in_words(const Session *s, char out[160]) {
    int lo = INT_MAX, hi = 0, all = tokens_said(s);
    int limit = uses_budget(s) && s->ratio < 0 ? s->budget : 0;         // rows a head; 0: there is none
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        lo = min_int(lo, s->head[i].len);
        hi = max_int(hi, s->head[i].len);
    }
    int n = 0;
    if (lo < hi) n = snprintf(out, 160, "%d..%d of", lo, hi);
    else n = snprintf(out, 160, lo == all ? "all" : "%d of", lo);
    n += snprintf(out + n, 40, " %d rows a head", all);
    if (!strcmp(what_is_saved(s), "reads")) snprintf(out + n, 40, " (saves reads, not memory)");
    else if (limit && all <= limit) snprintf(out + n, 40, ": the budget is %d", limit);
    else if (limit && lo > limit && session_evicts(s))
        snprintf(out + n, 90, " (over %d: the last reply's, dropped when you send the next message)", limit);
}

// The line after each reply: n_pre tokens prefilled, n_gen made in so many seconds; what is held, and how much
// of -c that is.
static void print_summary(const App *a, int n_pre, int n_gen, double seconds) {
    const Session *s = a->s;
    char rows[160];
    double held = (double)kv_bytes(s), full = (double)kv_bytes_full(s);
    if (quiet) return;
    rows_in_words(s, rows);
    fprintf(stderr, "%s[turn %d | %d tokens in, %d out, %.1f tok/s | KV %s of %s (%.1f %%) | %s | %.0f %% of -c]%s\n",
            in_color(stderr, COLOR_NUMBERS), s->turn, n_pre, n_gen, rate(n_gen, seconds), human_bytes(held).text,
            human_bytes(full).text, 100 * held / full, rows, 100.0 * rows_held(a) / ctx_limit(a),
            in_color(stderr, COLOR_OFF));
}

// ---- --ids FILE: teacher forcing (D3)
// Each line is a turn: the ids to prefill, then optionally | and the ids to decode one by one.

int is_blank(const char *p, const char *end) {
    while (p < end && isspace((unsigned char)*p)) p++;
    return p == end;
}

// The turns of a file, as a record; blank lines are skipped. Exit 2 with the line when there is
// something else in it.
static Turn *ids_read(const char *path, int V) {
    char err[512], *next;
    size_t n;
    char *text = read_plain_text(path, &n, err);
    if (!text) die(EXIT_USAGE, "--ids %s", err);
    Turn *turns = NULL;
    int number = 1, begun = 0, **to = NULL;             // of a line; begun 1: it has a turn, whose ids go to *to
    for (char *p = text; *p; p = next) {
        next = p + 1;
        number += *p == '\n';
        begun &= *p != '\n';
        if (isspace((unsigned char)*p)) continue;
        if (!begun) arrput(turns, (Turn){ 0 });
        Turn *t = &arrlast(turns);
        if (!begun) to = &t->pre;
        begun = 1;
        if (*p == '|' && t->pre && to == &t->pre) {
            to = &t->dec;
            continue;
        }
        errno = 0;
        long id = strtol(p, &next, 10);
        if (next == p)
            die(EXIT_USAGE, "%s:%d: '%.12s' is no id%s", path, number, p,
                t->pre ? "" : ": a turn begins with ids to prefill");
        if (errno || id < 0 || id >= V)
            die(EXIT_USAGE, "%s:%d: id %ld is outside the vocabulary of %d", path, number, id, V);
        arrput(*to, (int)id);
    }
    free(text);
    if (!turns) die(EXIT_USAGE, "--ids %s: no turn in the file", path);
    return turns;
}

int run_ids(App *a) {
    const char *path = opt_str(a->o, "dump-logits");
    size_t V = (size_t)a->c->V;
    a->turn = ids_read(opt_str(a->o, "ids"), a->c->V);
    FILE *f = !*path ? NULL : strcmp(path, "-") ? fopen(path, "wb") : stdout;
    if (*path && !f) die(EXIT_RUN, "--dump-logits %s: %s", path, strerror(errno));
    for (int i = 0; i < (int)arrlen(a->turn); i++) {
        const Turn *t = &a->turn[i];
        for (int j = -1; j < (int)arrlen(t->dec); j++) {
            if (j < 0) feed_prefill(a, t);
            else decode(a->s, t->dec[j]);
            if (f && fwrite(a->s->logits, sizeof(float), V, f) != V) die(EXIT_RUN, "%s: %s", path, strerror(errno));
        }
    }
    if (f && (f == stdout ? fflush(f) : fclose(f))) die(EXIT_RUN, "--dump-logits %s: %s", path, strerror(errno));
    if (opt_int(a->o, "json")) print_json(a, NULL);
    return 0;
}

// ---- sessions on disk: the record as json lines
// No rows are stored. Loading replays the record, which is exact for every method. A file begins with
// what the dialogue was made with, and has a line a message behind it:
//   {"session":3,"made":"--method=SPEC --OPTION \"VALUE\" ..","model":"FINGERPRINT"}
//   {"role":"system","content":TEXT}           if there is a system message of the user's
//   {"role":"user","content":TEXT,"ids":[ids to prefill],"system":N_SYS,"foot":N_FOOT,"head":N_HEAD}
//   {"role":"assistant","content":TEXT,"ids":[ids decoded]}
// The texts are for readers, the ids are what is fed. A message without a reply at the end is one whose
// reply was not finished.

// Goes on with the hash h over n tensors: of each its type, its shape, and all its bytes.
static uint64_t hash_tensors(uint64_t h, const Tensor *t, size_t n) {
    for (const Tensor *end = t + n; t < end; t++) {
        const int head[] = { t->dtype, t->rows, t->cols, t->data != NULL };
        h = hash_bytes(h, head, sizeof head);
        if (t->data) h = hash_bytes(h, t->data, tensor_bytes(t));
    }
    return h;
}

// The hash by which a session knows its model: every byte of every tensor, and the numbers of the
// config that change what the tensors compute. It reads the weights once, as one decode step does,
// and on one thread: that is quick enough (0.16 s for the 2.5 GB of a model of 1.2 billion weights).
static uint64_t model_fingerprint(const Config *c, const Weights *w) {
    const int sizes[] = { c->L, c->H, c->G, c->D, c->C, c->F, c->V, c->qk_norm, c->window, c->rope_type };
    const double numbers[] = { c->eps, w->rope_scale };
    uint64_t h = hash_bytes(2, sizes, sizeof sizes);
    h = hash_bytes(h, numbers, sizeof numbers);
    h = hash_bytes(h, w->inv_freq64, (size_t)c->D / 2 * sizeof *w->inv_freq64);
    if (c->windowed) h = hash_bytes(h, c->windowed, (size_t)c->L);
    h = hash_tensors(h, &w->embed, 1);
    h = hash_tensors(h, &w->norm, 1);
    if (w->head.data != w->embed.data) h = hash_tensors(h, &w->head, 1);
    return hash_tensors(h, (const Tensor *)w->layer, (size_t)c->L * sizeof *w->layer / sizeof(Tensor));
}

uint64_t app_fingerprint(App *a) {
    if (!a->fingerprint) a->fingerprint = model_fingerprint(a->c, a->w);
    return a->fingerprint;
}

void write_option(const App *a, const Options *plain, const char *name, FILE *f) {
    const char *value = opt_str(a->o, name);
    if (!opt_given(a->o, name) || !strcmp(value, opt_str(plain, name))) return;
    fprintf(f, " --%s ", name);
    json_escape(f, value, strlen(value));
}

void write_making(const App *a, FILE *f) {
    static const char *shared[] = {
        "budget", "ratio", "sink", "obs-window", "kernel", "chunk", "pool", "paper", "ctk", "ctv", "raw",
        "chat-template", "system",
    };
    Options *plain = options_like(a->o);
    fprintf(f, "--method=%s", a->method);
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) write_option(a, plain, shared[i], f);
    for (int i = 0; i < a->s->n_part; i++)
        for (const Opt *o = a->s->part[i].m->opts; o && o->name; o++) write_option(a, plain, o->name, f);
    options_free(plain);
}

char *written(const App *a, void (*write)(const App *a, FILE *f)) {
    char *text = NULL;
    size_t n;
    FILE *f = memory_stream(&text, &n);
    write(a, f);
    memory_stream_close(f);
    return text;
}

// Writes the line of a message of the user.
static void write_asked(const Turn *t, FILE *f) {
    json_print(f, "{'role':'user','content':%s,", t->user ? t->user : "");
    write_ids(f, t->pre);
    json_print(f, ",'system':%d,'foot':%d,'head':%d}\n", t->n_sys, t->n_foot, t->n_head);
}

// Writes the whole file of a model whose fingerprint is known.
static void session_write(const App *a, FILE *f) {
    char *made = written(a, write_making), model[20];
    snprintf(model, sizeof model, "%016llx", (unsigned long long)a->fingerprint);
    json_print(f, "{'session':3,'made':%s,'model':%s}\n", made, model);
    free(made);
    if (a->tp && opt_given(a->o, "system"))
        json_print(f, "{'role':'system','content':%s}\n", opt_str(a->o, "system"));
    for (int i = 0; i < (int)arrlen(a->turn); i++) {
        char *said = reply_text(a, &a->turn[i]);
        write_asked(&a->turn[i], f);
        json_print(f, "{'role':'assistant','content':%s,", said);
        write_ids(f, a->turn[i].dec);
        fprintf(f, "}\n");
        free(said);
    }
    if (a->asked) write_asked(a->asked, f);
}

// Saves the dialogue as a file. 0, or -1 with err, and then the old file stays.
static int session_save(App *a, const char *path, char err[512]) {
    Saving x;
    if (save_begin(&x, path, err)) return -1;
    (void)app_fingerprint(a);
    session_write(a, x.f);
    return save_keep(&x, err);
}

// --session FILE: saves the dialogue in it, if it has changed. Where it has gone on, as it mostly has, the new lines
// are appended and brought to the disk; else a whole file takes its place. A file that is not as this chat left it is
// another's now, and stays as it is. 0, or -1: it could not be saved, err says why, and the old file stays.
static int session_catch_up(App *a, char err[512]) {
    struct stat st;
    const char *path = opt_str(a->o, "session");
    if (!a->logged) return 0;
    size_t had = strlen(a->logged);
    if (had && (stat(path, &st) || st.st_size != (off_t)had))
        return fault(err, "%.300s: somebody else has changed it, so this dialogue is not saved there any more", path);
    (void)app_fingerprint(a);
    char *text = written(a, session_write);
    int bad = 0;
    saving_turn = 1;
    if (!had || strncmp(text, a->logged, had)) {
        bad = session_save(a, path, err);
    } else if (text[had]) {
        size_t more = strlen(text + had);
        int fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
        if (fd >= 0) errno = 0;             // where only a part of it finds room
        bad = fd < 0 || write(fd, text + had, more) != (ssize_t)more || (fsync(fd) && errno != EINVAL);
        if (bad) fault(err, "%.400s: %s; the old file stays", path, save_reason());
        if (bad && fd >= 0) (void)!ftruncate(fd, (off_t)had);
        if (fd >= 0) close(fd);
    }
    saving_turn = 0;
    free(bad ? text : a->logged);
    if (!bad) a->logged = text;
    return bad ? -1 : 0;
}

// The same, and a line on stderr says why not.
static void session_keep(App *a) {
    char err[512];
    if (session_catch_up(a, err)) warn("--session %s", err);
}

// ---- reading them
int read_whole(const Json *obj, const char *key, int lo, int hi, int *x, char err[512]) {
    const Json *j = json_get(obj, key);
    if (!j || j->type != JSON_NUMBER || !j->is_int || j->i < lo || j->i > hi)
        return fault(err, "'%s' is no whole number from %d to %d", key, lo, hi);
    *x = (int)j->i;
    return 0;
}

// The first line, NULL if there is none: is it one of this format, and of this model? *made: what it was made with,
// malloc'd. 0, or -1 with err.
static int session_header(App *a, const char *path, const Json *j, char **made, char err[512]) {
    const char *model = json_text(j, "model");
    int version;
    if (read_whole(j, "session", 3, 3, &version, err) || !*model || !*json_text(j, "made"))
        return fault(err, "%.400s: not a session file of this kvcomp", path);
    unsigned long long own = app_fingerprint(a), found = strtoull(model, NULL, 16);
    if (found != own)
        return fault(err, "%.300s: made with another model (fingerprint %016llx, this one has %016llx)", path,
                     found, own);
    *made = copy_text(json_text(j, "made"));
    return 0;
}

int ids_of_json(const Json *list, int V, int **ids, char why[512]) {
    if (!json_is(list, JSON_ARRAY)) return fault(why, "expected a list of \"ids\"");
    for (const Json *id = list->item; id < list->item + list->n; id++) {
        if (!id->is_int || id->i < 0 || id->i >= V)
            return fault(why, "id %.6g is outside the vocabulary of %d", id->num, V);
        arrput(*ids, (int)id->i);
    }
    return 0;
}

// A line behind it: a message of the user, which begins a turn of the record, or the reply to it. *asked 1: that is
// still to come. 0, or -1 with why.
static int session_line(App *a, const Json *j, int *asked, char why[512]) {
    const char *role = json_text(j, "role"), *text = json_text(j, "content"), *next = *asked ? "assistant" : "user";
    if (!strcmp(role, "system") && !arrlen(a->turn)) return 0;
    if (strcmp(role, next)) return fault(why, "expected a message of the %s", next);
    if (!*asked) arrput(a->turn, ((Turn){ .user = copy_text(text) }));
    Turn *t = &arrlast(a->turn);
    *asked = !*asked;
    if (ids_of_json(json_get(j, "ids"), a->c->V, *asked ? &t->pre : &t->dec, why)) return -1;
    if (*asked) {
        int n = (int)arrlen(t->pre);            // a later turn's may stand in the turns behind it
        if (!n && arrlen(a->turn) == 1) return fault(why, "no ids");
        return read_whole(j, "system", 0, n, &t->n_sys, why) || read_whole(j, "foot", 0, n, &t->n_foot, why)
            || read_whole(j, "head", 0, n, &t->n_head, why) ? -1 : 0;
    }

    // Where the template has written it anew in a later turn, a reply's text is not that of its ids.
    char *said = reply_text(a, t);
    if (strcmp(said, text)) t->reply = copy_text(text);
    free(said);
    return 0;
}

// Loads a session file, replays it, and says what is not as it was when it was saved. A line without its end, where a
// write was cut short, is left out. 0, or -1 with err, and then nothing has changed.
static int session_read(App *a, const char *path, char err[512]) {
    char why[512] = "", *made = NULL;
    size_t n;
    char *text = read_bounded(path, MOST_TEXT, &n, err);
    if (!text) return -1;
    Turn *own = a->turn;
    int number = 0, asked = 0, bad = 0;
    a->turn = NULL;
    for (char *p = text, *end; !bad && (end = memchr(p, '\n', (size_t)(text + n - p))); p = end + 1) {
        Json *j = json_parse(p, (size_t)(end - p), why);
        if (!number++) bad = session_header(a, path, j, &made, err);
        else if (!j || session_line(a, j, &asked, why))
            bad = fault(err, "%.300s, line %d: damaged: %.150s", path, number, why);
        json_free(j);
    }
    if (!number) bad = session_header(a, path, NULL, &made, err);
    char *goes_on = written(a, write_making);
    if (!bad && !quiet) {
        if (text[n - 1] != '\n') warn("%s: the last line was not written to its end, and is left out", path);
        if (asked) warn("%s: the last message got no reply, and is left out: %.400s", path, arrlast(a->turn).user);
        if (strcmp(goes_on, made)) warn("%s: made with %s, goes on with %s", path, made, goes_on);
    }
    if (!bad && asked) turn_free(arrpop(a->turn));
    if (!bad && replay(a, why)) bad = fault(err, "%.200s: %.300s", path, why);
    turns_free(bad ? a->turn : own);
    if (bad) a->turn = own;
    free(goes_on);
    free(made);
    free(text);
    return bad;
}

// LycheeCluster's chunker (section 11) cuts chunks at sentence ends and blanks, so it needs the
// text of a token. It knows no Tokenizer: it calls two functions with a pointer it does not look
// into.
static const char *chunker_bytes(const void *t, int id, int *len) { return tokenizer_bytes(t, id, len); }

static int chunker_special(const void *t, int id) { return tokenizer_is_special(t, id); }

// Lets the chunker read its texts from t. With t NULL every token is empty text.
static void lychee_text(const Tokenizer *t) {
    token_text = (TokenText){ t, chunker_bytes, chunker_special };
}

// What the trace was made with: the metadata of the file.
static void trace_meta(const App *a, SafeWriter *w) {
    char text[96];
    const Options *o = a->o;
    const Config *c = a->c;
    const struct { const char *name, *text; double x; } meta[] = {      // text NULL: x
        { "format", "kvcomp trace 1" },             { "method", a->method },
        { "budget", NULL, a->s->budget },           { "model", c->dir },
        { "model_type", c->model_type },            { "dtype", dtype_name(c->dtype) },
        { "L", NULL, c->L },                        { "H", NULL, c->H },
        { "G", NULL, c->G },                        { "D", NULL, c->D },
        { "C", NULL, c->C },                        { "F", NULL, c->F },
        { "V", NULL, c->V },                        { "window", NULL, c->window },
        { "rope_theta", NULL, c->theta },           { "simd", simd_name() },
    };
    for (size_t i = 0; i < sizeof meta / sizeof *meta; i++) {
        snprintf(text, sizeof text, "%.9g", meta[i].x);
        safe_write_meta(w, meta[i].name, meta[i].text ? meta[i].text : text);
    }
    for (int i = 0; i < (int)shlen(o->map); i++) {
        snprintf(text, sizeof text, "option.%.80s", o->map[i].key);
        safe_write_meta(w, text, o->map[i].value);
    }
    safe_write_meta_end(w);
}

// Opens --trace, if it is given, for the App's session. Exit 1 when the file cannot be written,
// exit 2 when the layers are wrong.
void trace_open(App *a) {
    const char *path = opt_str(a->o, "trace"), *layers = opt_str(a->o, "trace-layers");
    if (!*path) return;
    TraceFile *x = a->trace = xcalloc(1, sizeof *x);
    unsigned char *written = xmalloc((size_t)a->c->L);
    memset(written, !*layers, (size_t)a->c->L);
    int *list = *layers ? number_list("trace-layers", layers, 0, a->c->L - 1) : NULL;
    for (int i = 0; i < (int)arrlen(list); i++) written[list[i]] = 1;
    arrfree(list);
    x->trace = (Trace){ .put = trace_file_put, .layer = written };
    safe_write_begin(&x->out, path, "--trace");
    trace_meta(a, &x->out);
    trace_session(a->s, &x->trace);
}

void trace_close(App *a, int keep) {
    TraceFile *x = a->trace;
    if (!x) return;
    trace_session(a->s, NULL);
    a->trace = NULL;
    if (keep) safe_write_end(&x->out);
    else safe_write_drop(&x->out);
    free(x->trace.layer);
    free(x);
}

// ---- opening the model
// A file or folder that comes with the program: beside it, else in the working directory. Returns path.
const char *beside_program(const char *name, char path[PROGRAM_PATH]) {
    ssize_t n = readlink("/proc/self/exe", path, PROGRAM_PATH - 200);
    while (n > 0 && path[n - 1] != '/') n--;                // path[0,n): the program's folder
    n = n > 0 ? n : 0;
    snprintf(path + n, 200, "%s", name);
    if (!file_exists(path)) snprintf(path, PROGRAM_PATH, "%s", name);
    return path;
}

void default_model(Options *o) {
    char path[PROGRAM_PATH], err[256];
    options_set(o, "model", beside_program("models/kvcomp-tiny", path), err);
}

// ---- where a model lies
// -m takes a folder with config.json, or a model's name on the Hugging Face hub, org/name, which lies in the hub's
// cache as models--org--name. There the versions are snapshots/HASH, and the hash of the newest stands in refs/main.
// Nothing is downloaded.
enum { PATH_ROOM = 1024 };

// Where there is no such folder --model becomes the newest version in the cache, which is found as the hub's own
// programs find it. Exit 3, with the command that gets it, when it is not there. What is no such name stays as it
// is, without a slash at its end, and whoever opens it says what is wrong.
void find_model(Options *o) {
    static const struct { const char *variable, *below; } places[] = {
        { "HOME", "/.cache/huggingface/hub" }, { "XDG_CACHE_HOME", "/huggingface/hub" }, { "HF_HOME", "/hub" },
        { "HF_HUB_CACHE", "" },
    };
    char name[PATH_ROOM], path[2 * PATH_ROOM], hash[128] = "none", err[256];
    size_t length = strlen(opt_str(o, "model")), size;
    int n = 0;
    while (length > 1 && opt_str(o, "model")[length - 1] == '/') length--;
    if (!length || length >= sizeof name) return;
    snprintf(name, sizeof name, "%.*s", (int)length, opt_str(o, "model"));
    options_set(o, "model", name, err);
    const char *slash = strchr(name, '/');
    if (!slash || slash == name || strchr(slash + 1, '/') || *name == '.' || strpbrk(name, " \t\n\\")) return;
    if (length > 200 || file_exists(name)) return;
    for (int i = 0; i < 4; i++) {                                       // the last one that is set counts
        const char *value = getenv(places[i].variable);
        if (value && *value) n = snprintf(path, PATH_ROOM, "%.600s%s", value, places[i].below);
    }
    n += snprintf(path + n, sizeof path - (size_t)n, "/models--%.*s--%s", (int)(slash - name), name, slash + 1);
    snprintf(path + n, sizeof path - (size_t)n, "/refs/main");
    char *ref = read_bounded(path, MOST_CONFIG, &size, err);
    if (ref) (void)sscanf(ref, "%127s", hash);
    free(ref);
    snprintf(path + n, sizeof path - (size_t)n, "/snapshots/%s", hash);
    if (!file_exists(path))
        die(EXIT_MODEL, "%s: no such folder, and %.*s has no version of it; if it is a model of the Hugging Face hub, "
            "this gets it: hf download %s", name, n, path, name);
    options_set(o, "model", path, err);
}

// ---- the memory of this machine
// The first number in the file behind a word, or at its beginning for word ""; -1: there is none.
static double number_in(const char *path, const char *word) {
    char line[256];
    double x = -1;
    FILE *f = fopen(path, "r");
    while (f && x < 0 && fgets(line, sizeof line, f))
        if (!strncmp(line, word, strlen(word)) && sscanf(line + strlen(word), "%lf", &x) != 1) x = -1;
    if (f) fclose(f);
    return x;
}

double memory_free(void) {
    double free_kb = number_in("/proc/meminfo", "MemAvailable:");
    double limit = number_in("/sys/fs/cgroup/memory.max", ""), used = number_in("/sys/fs/cgroup/memory.current", "");
    double bytes = free_kb < 0 ? -1 : 1024 * free_kb;
    if (limit >= 0 && used >= 0 && (bytes < 0 || limit - used < bytes)) bytes = fmax(limit - used, 0);
    return bytes;
}

// Says what the model and a full context take at most, where that is more than is free: "6.4 MB weights + 2.6 TB rows
// at -c 1073741824; 19.6 GB free; -c 30000 would fit". It may go well all the same: weights are mapped from their
// files, and rows come as the dialogue grows.
static void tell_memory(const App *a) {
    const MemoryPlan p = memory_plan(a->s);
    char fits[64] = "";
    double weights = (double)p.weights, rows = (double)p.kv, room = memory_free();
    if (KV_DEV(a->s) || quiet || *opt_str(a->o, "ids") || room < 0 || weights + rows <= room) return;
    if (weights < room) snprintf(fits, sizeof fits, "; -c %.0f would fit", floor((room - weights) / rows * p.ctx));
    warn("WARNING: %s weights + %s rows at -c %d; %s free%s", human_bytes(weights).text, human_bytes(rows).text, p.ctx,
         human_bytes(room).text, fits);
}

size_t parameters_of(const Config *c) {
    size_t C = c->C, F = c->F, HD = (size_t)c->H * c->D, GD = (size_t)c->G * c->D;
    size_t layer = C * (HD + 2 * GD) + HD * C + 3 * C * F;
    return c->L * layer + (c->tied ? 1 : 2) * (size_t)c->V * C;
}

void open_config(App *a) {
    struct stat st;
    const char *shape = opt_str(a->o, "synthetic"), *file = opt_str(a->o, "file");
    if (!*shape && !*opt_str(a->o, "model")) default_model(a->o);
    a->c = *shape ? config_synthetic(shape) : config_load(opt_str(a->o, "model"));
    a->c->as_q8 = opt_choice(a->o, "weights", "file|q8_0");
    if (a->c->as_q8 && !strcmp(opt_str(a->o, "device"), "cuda"))
        die(EXIT_USAGE, "--weights q8_0 is for the CPU: -d cuda takes weights as the file has them");
    threads_use(opt_int(a->o, "threads"), parameters_of(a->c));
    int again = !*file || (!stat(file, &st) && S_ISREG(st.st_mode));        // text from a pipe is gone
    if (n_threads() > 1 && again) spin_shortly(args);
    if (!quiet) say_without_effect(a->o);
}

// Opens the weights of that config, or makes random ones, for which there has to be memory.
void open_weights(App *a) {
    int synthetic = *opt_str(a->o, "synthetic") != 0;
    double bytes = synthetic ? (double)weights_bytes(a->c) : 0, room = memory_free();
    if (room >= 0 && bytes > room)
        die(EXIT_MEMORY, "%s weights; %s free: too little for these random weights", human_bytes(bytes).text,
            human_bytes(room).text);
    a->w = synthetic ? weights_synthetic(a->c, 1) : weights_load(a->c);
}

void open_model(App *a) {
    open_config(a);
    open_weights(a);
}

// ---- choosing the device of -d auto
#ifdef KVCOMP_CUDA
enum {
    TRIAL_IDS = 300,        // of the prefill: enough for the kernels on tensor cores
    TRIAL_STEPS = 4,        // decode steps behind it
};

// The largest difference that bf16 weights and f16 rows may make. A broken kernel is off by the
// logits themselves.
static const double trial_tolerance = 1e-2;

// The largest difference of x and y (n), by the largest |x|. NaN differs by infinity.
static double largest_difference(const float *x, const float *y, int n) {
    double worst = 0, top = 0;
    for (int i = 0; i < n; i++) {
        double e = fabs((double)x[i] - y[i]);
        if (!(e <= worst)) worst = isnan(e) ? INFINITY : e;
        top = fmax(top, fabs((double)x[i]));
    }
    return worst / top;
}

// Does the GPU compute what the CPU computes? Random weights run on both, because a kernel that is
// wrong on somebody's card must not chat there: a prefill and a few steps, with all options of `like` at their
// defaults. Returns the largest difference of logits by the largest logit; -1: the trial died on the way, and its line
// is in die_text.
static double device_trial(const Options *like) {
    jmp_buf jump, *outer = die_jump;
    Config *c = config_synthetic("L2,H4,G2,D64,C128,F256,V512");
    Weights *w = weights_synthetic(c, 1);
    int n = (1 + TRIAL_STEPS) * c->V, *ids = random_ids(TRIAL_IDS, c->V);
    float *both = xcalloc(2 * (size_t)n, sizeof *both);     // the CPU's logits, then the GPU's
    size_t row = (size_t)c->V * sizeof *both;
    die_jump = &jump;
    int died = setjmp(jump);
    for (int gpu = 0; gpu < 2 && !died; gpu++) {
        char err[256];
        Options *o = options_like(like);
        options_set(o, "device", gpu ? "cuda" : "cpu", err);
        Session *s = session_open(c, w, o, "full");
        memcpy(both + gpu * n, prefill(s, ids, TRIAL_IDS), row);
        for (int i = 1; i <= TRIAL_STEPS; i++) memcpy(both + gpu * n + i * c->V, decode(s, ids[i]), row);
        session_close(s);
        options_free(o);
    }
    die_jump = outer;
    double e = died ? -1 : largest_difference(both, both + n, n);
    arrfree(ids);
    free(both);
    weights_close(w, c);
    return e;
}

// Is there a GPU that answers, holds the memory plan of --method, and passes the trial? Where one answers and
// does not serve, the user is told why. -d is cpu while this is asked. A method that cannot be opened at all
// keeps to the CPU: the session that is wanted then gives the reason.
static int device_serves(const App *a) {
    char why[512];
    Session *s = device_there() ? session_try(a->c, a->w, a->o, opt_str(a->o, "method"), why) : NULL;
    if (!s) return 0;
    s->batch = batch_rows(a->o, "cuda");
    int bad = device_bars(s, why) != 0;
    session_close(s);
    double e = bad ? 0 : device_trial(a->o);
    if (e < 0)
        bad = fault(why, "a trial of the GPU ended with: %.400s", die_text);
    else if (!(e < trial_tolerance))
        bad = fault(why, "its logits differ by %.1e of the largest: that is wrong", e);
    if (bad && !quiet) warn("-d auto keeps to the CPU: %s", why);
    return !bad;
}
#endif

// Makes cuda or cpu of -d auto. The plan is that of --method; other methods of a comparison ask again. Then says
// whether the device leaves --exact without effect.
void choose_device(App *a) {
    char err[512];
    if (!strcmp(opt_str(a->o, "device"), "auto")) {
        options_set(a->o, "device", "cpu", err);
#ifdef KVCOMP_CUDA
        if (!a->c->as_q8 && device_serves(a)) options_set(a->o, "device", "cuda", err);
#endif
    }
    int cpu = !strcmp(opt_str(a->o, "device"), "cpu");
    if (cpu && opt_int(a->o, "exact") && !quiet) warn("without effect with -d cpu: --exact");
}

// ---- opening the rest, and closing
// Text will be read or written where it is needed, so a missing tokenizer, a template that is refused, or ids that the
// model does not have end the program; the replay of --ids wants none of them. (--dump-tokens has no model.)
void open_tokenizer(App *a, int needed) {
    char err[512];
    const char *given = opt_str(a->o, "tokenizer"), *model = opt_str(a->o, "model"), *path = *given ? given : model;
    const char *name = opt_str(a->o, "chat-template");
    if (!*path && needed) die(EXIT_USAGE, "--synthetic has no tokenizer; give one with --tokenizer FILE");
    if (!*path) return;
    a->tok = tokenizer_load(path, err);
    if (!a->tok && needed) die(EXIT_MODEL, "%s", err);
    if (!a->tok && !quiet) warn("%s; going on without text (lychee then cuts chunks of 16)", err);
    if (!a->tok) return;
    lychee_text(a->tok);
    if (!opt_int(a->o, "raw")) {
        a->tp = template_load(*name || !*model ? path : model, *name ? name : NULL, a->tok, err);
        if (!a->tp && (needed || *name)) die(EXIT_MODEL, "%s", err);
        if (a->tp && *opt_str(a->o, "system") && a->tp->no_system)
            die(EXIT_USAGE, "--system: this chat template has no system message (%s)", a->tp->no_system);
    }
    if (needed && a->c && tokenizer_fits(a->tok, a->tp, a->c, err)) die(EXIT_MODEL, "%s", err);
}

void open_session(App *a) {
    a->method = copy_text(opt_str(a->o, "method"));
    a->s = session_open(a->c, a->w, a->o, a->method);
    tell_memory(a);
    int seed = opt_int(a->o, "seed");
    a->rng = seed < 0 ? (uint64_t)time(NULL) ^ (uint64_t)(now() * 1e9) : (uint64_t)seed;
}

App app_beside(const App *a, Options *o) {
    return (App){ .o = o, .c = a->c, .w = a->w, .tok = a->tok, .tp = a->tp, .rng = a->rng };
}

void app_beside_close(App *a) {
    turns_free(a->turn);
    session_close(a->s);
    options_free(a->o);
    free(a->method);
}

void app_close(App *a) {
    app_beside_close(a);
    template_free(a->tp);
    lychee_text(NULL);                                      // its texts go with the tokenizer
    tokenizer_free(a->tok);
    if (a->w) weights_close(a->w, a->c);
    free(a->logged);
}

int arg_count;           // the command line, for a report's source
char **args;

// Does the reply hold the answer as whole words in their order? With `whole`: and nothing else?
int holds_answer(const char *said, const char *gold, int whole) {
    char **a = words_of(said, WORDS_BARE), **b = words_of(gold, WORDS_BARE);
    int n = (int)arrlen(a), m = (int)arrlen(b), hit = 0;
    int possible = m > 0 && (!whole || n == m);
    for (int i = 0; possible && !hit && i + m <= n; i++) {
        int j = 0;
        while (j < m && !strcmp(a[i + j], b[j])) j++;
        hit = j == m;
    }
    words_free(a);
    words_free(b);
    return hit;
}

// The words of a text: an stb_ds array of malloc'd strings, for words_free.
char **words_of(const char *text, int how) {
    char *plain = copy_text(text), *to = plain, *rest = NULL, **words = NULL;
    for (const char *p = text; *p && how != WORDS_RAW; p++)
        if (!ispunct((unsigned char)*p)) *to++ = (char)tolower((unsigned char)*p);
    if (how != WORDS_RAW) *to = 0;
    for (char *w = strtok_r(plain, " \t\n\v\f\r", &rest); w; w = strtok_r(NULL, " \t\n\v\f\r", &rest)) {
        int article = word_place("a|an|the", w) >= 0;
        if (how != WORDS_BARE || !article) arrput(words, copy_text(w));
    }
    free(plain);
    return words;
}

void words_free(char **w) {
    while (arrlen(w)) free(arrpop(w));
    arrfree(w);
}

// ==================================================================================================== CHAT
// The commands and the turns. The first Ctrl-C stops the reply and keeps it in the history and in the
// cache, or takes a message back that is still being read; a second within a second leaves with 130.
// Without a terminal every input line is a turn.

// ---- a turn of the chat
int ids_known(const Config *c, const int *ids, char err[512]) {
    int n = (int)arrlen(ids), known = ids_with_rows(c, ids, n);
    return known == n ? 0 : fault(err, "this text names token id %d, the embedding has %d rows", ids[known], c->V);
}

int message_feed(App *a, const char *text, char err[512]) {
    if (a->stale && replay(a, err)) return -1;
    Turn t = render_turn(a, text, err);
    const int back = t.back;
    int bad = *err || !arrlen(t.pre) || ids_known(a->c, t.pre, err)
           || make_room(a, max_int((int)arrlen(t.pre) - back, 0), a->s->pos_extra, err);
    if (bad) {
        turn_free(t);
        return -1;
    }
    a->asked = &t;
    session_keep(a);                    // before the reply: whatever ends the program costs the reply only
    a->asked = NULL;
    Turn *before = turns_copy(a->turn);
    if (session_take_back(a, &t, err) || feed_message(a, &t)) {
        turn_free(t);
        turns_free(a->turn);
        a->turn = before;
        a->stale |= back > 0;           // the session lacks what was taken back
        return -1;
    }
    turns_free(before);
    arrput(a->turn, t);
    a->rewrote += back;
    return 0;
}

// A turn begins: signals wait for its end.
static void turn_begin(void) {
    interrupts = 0;
    turn_runs = 1;
}

// The rest of a turn: where a message was fed, the reply to it, with a newline behind it, and the summary line; the
// dialogue is saved, and a signal that waited has its way. When that comes before the first token of a reply the file
// stays as it is: it has the message, or the reply that was to be made again.
static void turn_end(App *a, int fed, FILE *out) {
    double t0 = now();
    int made = fed ? generate(a, opt_int(a->o, "n-predict"), out) : 0;
    if (fed && out) {
        fputc('\n', out);
        fflush(out);
    }
    if (fed) print_summary(a, (int)arrlen(arrlast(a->turn).pre), made, now() - t0);
    if (made || !leaving) session_keep(a);
    turn_runs = 0;
    if (!leaving) return;
    fflush(stdout);
    leave(leaving);
}

int chat_turn(App *a, const char *text, FILE *out) {
    char err[512];
    int had = a->rewrote;
    turn_begin();
    int bad = message_feed(a, text, err), refused = bad && *err;
    if (refused) warn("%s", err);
    else if (bad && stop_asked() && !leaving && !quiet) fprintf(stderr, "\n(the message is taken back)\n");
    if (!had && a->rewrote && !quiet)
        tell("this chat template writes earlier messages otherwise as the dialogue goes on: the last %d tokens are "
             "taken back and read anew", a->rewrote);
    turn_end(a, !bad, out);
    return refused ? -1 : 0;
}

// What a replay that began at t0 came to: "streaming, budget 64: 312 tokens replayed in 0.2 s, 73 of
// 336 rows a head".
static void confirm_replay(const App *a, double t0) {
    char rows[160], budget[96] = "";
    const Session *s = a->s;
    const char *pick = a->picked ? " (picked for this dialogue; /budget N takes another)" : "";
    if (quiet) return;
    if (uses_budget(s) && s->ratio >= 0) snprintf(budget, sizeof budget, ", ratio %.4g", s->ratio);
    else if (uses_budget(s)) snprintf(budget, sizeof budget, ", budget %d%s", s->budget, pick);
    rows_in_words(s, rows);
    if (!s->n_tok) tell("%s%s: the dialogue is empty", a->method, budget);
    else tell("%s%s: %d tokens replayed in %.1f s, %s", a->method, budget, tokens_said(s), now() - t0, rows);
}

// The budget that the chat picks, so that there is something to lose: a quarter of the dialogue's rows, but not less
// than every method can do with.
static int quarter_of_dialogue(const App *a) { return max_int(tokens_said(a->s) / 4, 40); }

// Opens another method (or the same again), with another budget unless that is NULL, and plays the dialogue into it.
// Where the user has given neither --budget nor --ratio, and the method's own budget holds the whole dialogue, so that
// nothing would happen, it gets a quarter of it. Where that is refused a->err says why, and the old session stays.
static void chat_method(App *a, const char *spec, const char *budget) {
    char text[16];
    double t0 = now();
    int n = tokens_said(a->s), quarter = quarter_of_dialogue(a), bad = 0;
    App next = *a;
    next.o = options_copy(a->o);
    next.method = copy_text(spec);
    next.s = NULL;
    next.picked = 0;
    if (budget) {
        bad = options_set(next.o, "budget", budget, a->err);
        (void)shdel(next.o->given, "ratio");
    } else if (a->picked) {                     // the new method has its own
        options_set(next.o, "budget", "0", a->err);
        (void)shdel(next.o->given, "budget");
    }
    if (!bad) next.s = session_try(a->c, a->w, next.o, spec, a->err);
    int picks = next.s && uses_budget(next.s) && !opt_given(next.o, "budget") && !opt_given(next.o, "ratio");
    if (picks && next.s->budget >= n && quarter < n) {
        session_close(next.s);
        snprintf(text, sizeof text, "%d", next.picked = quarter);
        options_set(next.o, "budget", text, a->err);
        next.s = session_try(a->c, a->w, next.o, spec, a->err);
    }
    if (next.s) {
        (void)session_try_reset(a->s);          // two sessions full of rows may be more than there is memory for
        a->stale = 1;
    }
    if (next.s && !replay(&next, a->err)) {
        App was = *a;
        *a = next;
        next = was;
        confirm_replay(a, t0);
    }
    session_close(next.s);
    options_free(next.o);
    free(next.method);
}

int chat_clear(App *a) {
    if (session_try_reset(a->s)) {
        warn("the dialogue stays: %s", a->s->err);
        return -1;
    }
    record_clear(a);
    a->stale = 0;
    return 0;
}

// ---- several methods side by side
// The demonstration and /compare play the same messages through sessions of several methods. Each
// side is an App of its own that borrows model, tokenizer and template. Replies are greedy, so that
// only the method makes a difference. What is printed is the asked-for result: it goes to stdout.

// The methods that play; the one in use does, too, if it is none of them.
static const char *const side_methods[] = { "full", "streaming", "dililazy", "lychee", "sonic" };
enum { N_SIDES = sizeof side_methods / sizeof *side_methods };

// Opens a side. Model, tokenizer, template and options are a's; method is what plays.
void side_open(Side *x, const App *a, const Options *o, const char *method) {
    *x = (Side){ .app = app_beside(a, options_copy(o)) };
    x->app.method = copy_text(method);
    x->app.s = session_try(a->c, a->w, x->app.o, method, x->refused);
    int budget = x->app.s && uses_budget(x->app.s) ? x->app.s->budget : 0;
    if (budget) snprintf(x->label, sizeof x->label, "%.20s %d", method, budget);
    else snprintf(x->label, sizeof x->label, "%.31s", method);
}

void side_close(Side *x) {
    app_beside_close(&x->app);
    free(x->reply);
}

// Names a side that cannot play, and why.
static void side_refused(const Side *x) {
    if (*x->refused) warn("%s is left out: %s", x->label, x->refused);
}

// The sides of a run (stb_ds), greedy and with this budget where the user has set none. Into each the dialogue is
// played, unless the run begins anew. A line names a side that cannot play.
static Side *sides_open(const App *a, int budget, int anew) {
    char err[256], text[16];
    Options *o = options_copy(a->o);
    Side *x = NULL;
    int own = 1;
    snprintf(text, sizeof text, "%d", budget);
    options_set(o, "temp", "0", err);
    if (!opt_given(o, "ratio") && opt_int(o, "budget") <= 0) options_set(o, "budget", text, err);
    // Two full layers would be a third of the shipped model, and those in which its copying heads are.
    if (!opt_given(o, "full-layers") && a->c->L < 8) options_set(o, "full-layers", "1", err);
    if (anew) (void)shdel(o->given, "system");
    for (int i = 0; i < N_SIDES; i++) own &= strcmp(a->method, side_methods[i]) != 0;
    interrupts = 0;
    for (int i = 0; i < N_SIDES + own && !interrupts; i++) {
        Side *side = arraddnptr(x, 1);
        side_open(side, a, o, i < N_SIDES ? side_methods[i] : a->method);
        if (!anew) side->app.turn = turns_copy(a->turn);
        if (!anew && !*side->refused) replay(&side->app, side->refused);
        side_refused(side);
    }
    options_free(o);
    return x;
}

static void sides_close(Side *x /* stb_ds */) {
    for (int i = 0; i < (int)arrlen(x); i++) side_close(&x[i]);
    arrfree(x);
}

// Sends one message to a side and keeps the reply, of at most n tokens. The session's clock has what its steps read.
// 0, or -1 with the reason in x->refused when there is no room for it.
static int side_turn(Side *x, const char *text, int n) {
    App *a = &x->app;
    if (message_feed(a, text, x->refused)) return -1;
    a->s->clk.bytes_attended = a->s->clk.steps = 0;
    generate(a, n, NULL);
    free(x->reply);
    x->reply = reply_text(a, &arrlast(a->turn));
    return 0;
}

// ---- several methods side by side: the lines they get
// One line: label, mark, in two columns what is held and read in a step, and the reply, which takes more lines if it
// is long.
static void side_columns(const char *label, const char *mark, const char *held, const char *read, const char *reply) {
    int before = printf("  %-13s %-8s%9s%9s  ", label, mark, held, read);
    print_wrapped(stdout, reply, before, max_int(screen_columns(), before + 12));
    fflush(stdout);
}

// The line of a side: what it holds, and what a step of the last reply read.
static void side_line(const Side *x, const char *mark, const char *reply) {
    side_columns(x->label, mark, human_bytes((double)kv_bytes(x->app.s)).text,
                 human_bytes(bytes_a_step(x->app.s)).text, reply);
}

// Sends a message to every side that plays, and prints the replies, of at most n tokens. To a question, whose answer
// is known or wanted (brief 0), every side has its line; else the first, and whoever replies otherwise.
static void sides_turn(Side *x /* stb_ds */, const char *text, const char *answer, int n, int brief) {
    const char *first = NULL;
    for (int i = 0; i < (int)arrlen(x) && !interrupts; i++) {
        if (*x[i].refused) continue;
        if (side_turn(&x[i], text, n)) {
            side_refused(&x[i]);
            continue;
        }
        int same = !first || !strcmp(first, x[i].reply);
        const char *mark = same ? "same" : "differs";
        if (answer) {
            int right = holds_answer(x[i].reply, answer, 0);
            x[i].asked++;
            x[i].right += right;
            mark = right ? "right" : "WRONG";
        }
        if (answer || !brief || !first || !same) side_line(&x[i], mark, x[i].reply);
        if (!first) first = x[i].reply;
    }
}

// ---- the demonstration
const DemoLine demo_lines[N_DEMO_LINES] = {
    { "My name is Anna.", NULL },
    { "I live in Oslo.", NULL },
    { "I have a dog named Bello.", NULL },
    { "I am tired.", NULL },
    { "Please read: A tired train stood behind the station. There is a wind near the street. The number "
      "of the blue box is 795. It rained on the fence all day. From the window you can see the star.", NULL },
    { "How are you?", NULL },
    { "We saw a broken bat by the church. Every Saturday the boat is empty. The red key costs 35 coins. "
      "There is a river near the star.", NULL },
    { "My password is 4821.", NULL },
    { "Tell me a joke.", NULL },
    { "They painted the mountain and cleaned the leaf. The wind moved the church and the gate. "
      "It rained on the gate all day. On Sunday the moon looked busy.", NULL },
    { "I play the flute.", NULL },
    { "Which instrument do I play?", "flute" },
    { "What is my password?", "4821" },
    { "What is my name?", "Anna" },
    { "Where do I live?", "Oslo" },
    { "What is my dog called?", "Bello" },
    { "How much does the red key cost?", "35" },
    { "What is the number of the blue box?", "795" },
};
enum { SHOW_BUDGET = 64, SHOW_REPLY = 24 };     // rows a head, unless the user says otherwise; tokens

void demo(App *a, const char *arg) {
    double t0 = now();
    (void)arg;
    Side *x = sides_open(a, SHOW_BUDGET, 1);
    print_wrapped(stdout, "The same messages to several methods, each with its own cache; behind its name stands how "
                  "many rows a head may have. held: bytes of rows in the cache. read: bytes of rows that a step of the "
                  "reply reads. Who replies as full does has a line for answers only.", 0, screen_columns());
    printf("\n");
    side_columns("method", "", "held", "read", "reply");
    for (int i = 0; i < N_DEMO_LINES && !interrupts; i++) {
        printf("\n> ");
        print_wrapped(stdout, demo_lines[i].user, 2, screen_columns());
        sides_turn(x, demo_lines[i].user, demo_lines[i].answer, SHOW_REPLY, 1);
    }

    // What each side got right, what it holds, what the last answer read, and what it does.
    if (!interrupts) printf("\n");
    if (!interrupts) side_columns("method", "right", "held", "read", "what it does");
    for (int i = 0; i < (int)arrlen(x) && !interrupts; i++) {
        char right[32];
        snprintf(right, sizeof right, "%d of %d", x[i].right, x[i].asked);
        if (!*x[i].refused && x[i].asked) side_line(&x[i], right, x[i].app.s->part[0].m->keeps);
    }
    if (!quiet) fprintf(stderr, "%.1f s\n", now() - t0);
    sides_close(x);
}

// ---- /compare
// /compare QUESTION: asks it of every side, behind the present dialogue, which stays as it is. Without a
// --budget it is a quarter of the dialogue, so that there is something to lose.
static void command_compare(App *a, const char *question) {
    int n = opt_int(a->o, "n-predict"), users = opt_int(a->o, "budget"), quarter = quarter_of_dialogue(a);
    if (!quiet && !opt_given(a->o, "ratio"))
        fprintf(stderr, "%d rows a head%s; the replies are greedy, and the dialogue stays as it is\n",
                users ? users : quarter, users ? "" : " (a quarter of the dialogue; /budget sets another)");
    Side *x = sides_open(a, quarter, 0);
    side_columns("method", "as full", "held", "read", "reply");
    sides_turn(x, question, NULL, n < 0 ? SHOW_REPLY * 4 : n, 0);
    sides_close(x);
}

// ---- commands. arg is what stands behind the name, "" when nothing does; a->err is said behind a command

// /stats: three lines of the session.
static void command_stats(App *a, const char *arg) {
    (void)arg;
    if (session_ready(a)) return;
    const Session *s = a->s;
    const Clock *k = &s->clk;
    fprintf(stderr, "method %s, %d tokens seen in %d turns, most rows in a head %d\n",
            a->method, s->n_tok, s->turn, rows_held(a));
    fprintf(stderr, "stored %s of %s, metadata %s, peak %s, read per decode step %s\n",
            human_bytes((double)kv_bytes(s)).text, human_bytes((double)kv_bytes_full(s)).text,
            human_bytes((double)kv_meta_bytes(s)).text, human_bytes((double)k->peak).text,
            human_bytes(bytes_a_step(s)).text);
    fprintf(stderr, "prefill %ld tok at %.1f tok/s, decode %ld tok at %.1f tok/s; ",
            k->n_prefill, rate(k->n_prefill, k->prefill), k->n_decode, rate(k->n_decode, k->decode));
    fprintf(stderr, "seconds: attention %.3f, selection %.3f, bookkeeping %.3f, index %.3f\n",
            k->attend, k->select, k->commit, k->index);
}

// ---- /show: the dialogue, each word in a colour that says how many heads still hold its row
static const struct Shade {
    const char *color, *mark;       // where there are no colours the mark stands before the words
} shades[] = {                      // none, up to a third, up to two thirds, most, all of the heads
    { "\x1b[2m",    "[0]"     },
    { "\x1b[34m",   "[1-33]"  },
    { "\x1b[36m",   "[34-66]" },
    { "\x1b[32m",   "[67-99]" },
    { "\x1b[1;32m", "[100]"   },
};

// The words of the dialogue so far. Control tokens have none, and begin a line. A character may be several
// tokens: it has the shade of the last one.
static void command_show(App *a, const char *arg) {
    (void)arg;
    if (session_ready(a)) return;
    const Session *s = a->s;
    Decoder d = { .t = a->tok, .skip_special = 1 };
    int all = s->c->L * s->c->G, shade = -1, column = 0, colors = *in_color(stdout, COLOR_OFF) != 0;
    int *holders = xcalloc((size_t)s->n_tok + 1, sizeof *holders);          // heads that hold a row of each token
    for (int i = 0; i < all; i++)
        for (int r = 0; r < s->head[i].len; r++) holders[s->head[i].src[r]]++;
    char *text = NULL;
    for (int t = 0; t < s->n_tok; t++) {
        int id = s->tok[t].id, held = holders[t], next = held == all ? 4 : held ? 1 + (3 * held - 1) / all : 0;
        if (id < 0) continue;                                   // no token of the text
        text = decode_token(&d, id, text);
        int n = (int)arrlen(text), ends = tokenizer_is_special(a->tok, id) || (n == 1 && *text == '\n');
        if (ends && column) fputc('\n', stdout);                // no empty lines behind control tokens
        if (ends || n) column = !ends && text[n - 1] != '\n';
        if (n && !ends) {
            if (shade != next && colors) printf("%s%s", COLOR_OFF, shades[next].color);
            if (shade != next && !colors) fputs(shades[next].mark, stdout);
            shade = next;
            write_text(&text, stdout);
        }
        arrsetlen(text, 0);
    }
    if (shade >= 0) fputs(in_color(stdout, COLOR_OFF), stdout);
    if (column) fputc('\n', stdout);
    arrfree(text);
    free(holders);

    fputs("% of the heads hold a word's row:", stdout);
    for (int i = 0; i < 5; i++)
        printf(" %s%s%s", in_color(stdout, shades[i].color), shades[i].mark, in_color(stdout, COLOR_OFF));
    fputc('\n', stdout);
}

static void command_clear(App *a, const char *arg) {
    (void)arg;
    int n = (int)arrlen(a->turn);
    if (!chat_clear(a) && !quiet) tell("the dialogue is empty: %d turn%s forgotten", n, n == 1 ? "" : "s");
}

// Makes the last reply again: everything up to its first token is replayed, and new random numbers
// go on from there. When the method does not open again, the reply stays.
static void command_regen(App *a, const char *arg) {
    char err[512];
    (void)arg;
    if (!arrlen(a->turn)) {
        fprintf(stderr, "nothing to make again\n");
        return;
    }
    Turn *t = &arrlast(a->turn);
    int *reply = t->dec;
    t->dec = NULL;
    if (replay(a, err)) {
        t->dec = reply;
        fault(a->err, "the reply stays: %.480s", err);
    } else {
        arrfree(reply);
        turn_begin();
        turn_end(a, 1, stdout);
    }
}

// Without a name: prints the one in use, and all there are.
static void command_method(App *a, const char *arg) {
    if (*arg) {
        chat_method(a, arg, NULL);
        return;
    }
    fprintf(stderr, "%s; /method NAME or NAME+NAME takes another of\n", a->method);
    EACH_METHOD(m) {
        fprintf(stderr, "  %-19s", (*m)->name);
        print_wrapped(stderr, (*m)->keeps, 21, screen_columns());
    }
}

// Opens the method again with another budget, which takes the place of --ratio if that was given. Without a number:
// prints the one in use. A method that has no budget says so.
static void command_budget(App *a, const char *arg) {
    if (*arg) chat_method(a, a->method, arg);
    else fprintf(stderr, "%d\n", a->s->budget);
    if (!uses_budget(a->s)) fprintf(stderr, "%s has no budget: the number waits for another /method\n", a->method);
}

// The system message is in the first turn, so a new one needs a new dialogue. Without a text: shows
// the one in use. "" stands for an empty one.
static void command_system(App *a, const char *arg) {
    const char *used = opt_str(a->o, "system");
    if (*arg && a->tp && a->tp->no_system) {
        warn("this chat template has no system message (%s)", a->tp->no_system);
    } else if (*arg) {
        if (!a->tp) fprintf(stderr, "there is no chat template: a system message has no effect\n");
        if (chat_clear(a) || options_set(a->o, "system", strcmp(arg, "\"\"") ? arg : "", a->err)) return;
        if (!quiet) tell("another system message; the dialogue is empty");
    } else if (opt_given(a->o, "system")) {
        tell("%s", *used ? used : "(an empty system message)");
    } else {
        tell("no system message but the template's own, if it has one");
    }
}

static void command_read(App *a, const char *arg) {
    size_t n;
    char *text = read_plain_text(arg, &n, a->err);
    if (text) chat_turn(a, text, stdout);
    free(text);
}

static void command_save(App *a, const char *arg) {
    int n = (int)arrlen(a->turn);
    if (!session_save(a, arg, a->err) && !quiet) tell("%s: %d turn%s kept", arg, n, n == 1 ? "" : "s");
}

static void command_load(App *a, const char *arg) {
    double t0 = now();
    if (!session_read(a, arg, a->err)) confirm_replay(a, t0);
}

static void command_help(App *a, const char *arg);

// A new command is a function above and an entry here, from which /help and Tab have it. One without a
// function leaves, one without a help text is another's second name.
static const struct Command {
    const char *name;
    const char *arg;        // what stands behind the name in /help
    const char *help;
    void (*run)(App *a, const char *arg);
    const char *needs;      // what must stand behind it: NULL: nothing; "a file": Tab completes its name
} commands[] = {
    { "/help",    "",       "this list (so does /?)", command_help, NULL },
    { "/method",  " NAME",  "another method; the dialogue is played into it again, with a budget picked for it "
                            "where you gave none", command_method, NULL },
    { "/budget",  " N",     "another budget of rows a head, likewise", command_budget, NULL },
    { "/compare", " TEXT",  "what several methods reply to it; the dialogue stays as it is", command_compare,
                            "a question" },
    { "/demo",    "",       "a scripted dialogue through several methods, side by side", demo, NULL },
    { "/stats",   "",       "bytes, rows, speed, the method's own numbers", command_stats, NULL },
    { "/show",    "",       "the dialogue, coloured by how many heads still hold a word", command_show, NULL },
    { "/clear",   "",       "forget the dialogue", command_clear, NULL },
    { "/regen",   "",       "make the last reply again", command_regen, NULL },
    { "/system",  " TEXT",  "another system message, with a new dialogue", command_system, NULL },
    { "/read",    " FILE",  "a file's text as your message", command_read, "a file" },
    { "/save",    " FILE",  "keep the dialogue", command_save, "a file" },
    { "/load",    " FILE",  "go on with a kept one", command_load, "a file" },
    { "/quit",    "",       "leave (so do /bye and Ctrl-D); Ctrl-C stops a reply", NULL, NULL },
    { "/?",       "",       NULL, command_help, NULL },
    { "/exit",    "",       NULL, NULL, NULL },
    { "/bye",     "",       NULL, NULL, NULL },
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static void command_help(App *a, const char *arg) {
    (void)a;
    (void)arg;
    for (const struct Command *c = commands; c->help; c++) {
        fprintf(stderr, "%s%-*s ", c->name, 16 - (int)strlen(c->name), c->arg);
        print_wrapped(stderr, c->help, 17, screen_columns());
    }
    fputs("/method, /budget and /system alone say what is in use.\n"
          "Tab completes commands, methods and files; arrows up and down and Ctrl-R bring\n"
          "messages back; Alt-Enter breaks a line, as does \\ at its end.\n"
          "The line after a reply: tokens read and written and the speed of writing; bytes\n"
          "of keys and values (KV) held, of what full attention would hold; rows that each\n"
          "head holds, of the tokens so far; the share of -c, the most it may hold.\n", stderr);
}

// Runs a line that begins with /, which is cut into name and argument. 1: the chat is over.
static int chat_command(App *a, char *line) {
    char *arg = line + strcspn(line, " \t\n");
    while (isspace((unsigned char)*arg)) *arg++ = 0;
    const char *near = NULL;
    int distance = min_int(3, (int)strlen(line) - 1);       // the / is right, so it says nothing
    for (const struct Command *c = commands; c < commands + N_COMMANDS; c++) {
        nearer_name(line, c->name, &near, &distance);
        if (strcmp(line, c->name)) continue;
        if (!c->run) return 1;
        *a->err = 0;
        if (c->needs && !*arg) fprintf(stderr, "%s wants %s\n", line, c->needs);
        else c->run(a, arg);
        if (*a->err) warn("%s", a->err);
        return 0;
    }
    if (near) tell("no command %s; did you mean %s? /help lists them", line, near);
    else tell("no command %s; /help lists them", line);
    return 0;
}

// ---- completion
// NameAt of a chat: commands, behind /method the names of methods, behind /read, /save and /load paths.
static const char *chat_name(const char *line, int from, int i, int *paths) {
    size_t n = strcspn(line, " ");
    *paths = 0;
    if (*line != '/') return NULL;
    if (!from) return i < N_COMMANDS ? commands[i].name : NULL;
    for (const struct Command *c = commands; c < commands + N_COMMANDS; c++)
        if (strlen(c->name) == n && !strncmp(line, c->name, n)) *paths = c->needs && !strcmp(c->needs, "a file");
    return !strncmp(line, "/method ", 8) && methods[i] ? methods[i]->name : NULL;
}

// ---- the chat
// A file that cannot be saved is found now, not when there is something to save.
void session_begin(App *a) {
    char err[512];
    struct stat st;
    const char *path = opt_str(a->o, "session");
    if (!*path) return;
    a->logged = copy_text("");
    int there = !stat(path, &st) && st.st_size > 0;
    if ((there && session_read(a, path, err)) || session_catch_up(a, err)) die(EXIT_RUN, "--session %s", err);
}

void session_end(App *a) {
    char err[512];
    if (session_catch_up(a, err)) die(EXIT_RUN, "--session %s", err);
}

// Two lines for who begins: what this is, and what to type.
static void greet(const App *a) {
    const char *slash = strrchr(a->c->dir, '/'), *model = slash ? slash + 1 : a->c->dir;
    tell("kvcomp %s, model %s, method %s. /help lists commands, Ctrl-D leaves.", KVCOMP_VERSION, model, a->method);
    if (strcmp(model, "kvcomp-tiny")) tell("/compare QUESTION asks several methods, /method NAME takes another one.");
    else tell("It recalls facts, one a message. Try: My name is Anna. | What is my name? | /demo");
}

int chat(App *a) {
    char *text = NULL;
    int r, done = 0;
    watch_keyboard();
    session_begin(a);
    messages_begin(!opt_int(a->o, "no-history"), chat_name);
    if (isatty(0) && isatty(1) && !quiet) greet(a);
    chat_busy = 1;
    while (!done && (r = read_message(&text)) != READ_END) {
        if (r == READ_INTERRUPTED) {
            interrupt_at_prompt();
        } else if (text[0] == '/') {
            done = chat_command(a, text);
            session_keep(a);
        } else if (text[0]) {
            chat_turn(a, text, stdout);
        }
    }
    arrfree(text);
    messages_end();
    chat_busy = 0;
    session_end(a);
    if (!opt_int(a->o, "json")) return 0;
    if (session_ready(a)) die(EXIT_RUN, "%s", a->err);
    print_json(a, NULL);
    return 0;
}
