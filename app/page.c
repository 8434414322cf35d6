// app/page.c - measurements and pictures as one page, and what a browser calls.
#define _GNU_SOURCE
#include "page.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#include <stb/stb_ds.h>

// ==================================================================================================== REPORT
// `--report OUT.html` writes what was measured and what the methods do as one page with nine
// pictures. The page needs nothing else: no network, no library, and a script for two sliders only.
// OUT.csv beside it holds the numbers.
//
// Pictures 1 and 2 show the scores of --eval, or of a default evaluation of a few seconds when none
// is asked for. Pictures 3 to 9 come from a demonstration: a built-in dialogue of seven turns is
// played through each method of --compare, or else of --method, or else of a default set. Full
// attention speaks first. The other methods are fed its replies, so that all of them hold the same
// tokens, and each answers only the last question itself.
//
// Small drawings are inline SVG, with y downwards, in units of which a screen shows one or a few to
// a pixel: charts grow and shrink with their column. Attention maps are PNG images, embedded as
// base64.

enum {
    DEMO_TURNS  = 7,
    DEMO_BUDGET = 96,           // rows per KV head in the demonstration when the user gives no budget
    DEMO_MOST   = 256,          // a larger budget is cut to this: the dialogue has about 450 tokens
    MAP_SIDE    = 256,          // pixels of an attention map's side, at most, and units of it in the drawing
    MAP_LEFT    = 72,           // units beside a map for the text of tokens
    MAP_TOP     = 8,            // units above it
    MAP_MOST    = 36,           // attention maps of a model, about
    SHADES      = 16,           // colours of the viridis scale
    TEXT_SHADES = 8,            // colours of picture 8's text, beside grey
};
enum { PHASE_PREFILL, PHASE_DECODE, PHASES };
enum { IN_ATTEND, IN_SELECT, IN_COMMIT, IN_REST, PHASE_PARTS };     // where the time of a phase goes

static const char *demo_turns[DEMO_TURNS] = {           // what the user says
    "My name is Tara.",

    "Please read: The old mill was dusty and quiet. There is a garden near the river. A tall lamp "
    "stood behind the church. The wind moved the gate and the leaf. On Monday the street looked "
    "empty. The secret code of the red box is 4821. A badger slept under the bridge. The narrow "
    "path leads to the warm kitchen. People say that the market was once busy. It rained on the "
    "fence all day. From the hill you can see the lake. Every Friday the school is full.",

    "Here is a text: The fox walked along the quiet road. They painted the wall and cleaned the "
    "window. Nobody knew why the forest was so dark. The sun shone on the mountain. The golden key "
    "is in the cellar. We saw a clever swan by the boat. Some like the moon, others like the star. "
    "It was a cold day in the village. The shop was full of people. There is a stone near the "
    "station. A slow cloud stood behind the tree. The farm is pretty in the morning.",

    "What is my name?",

    "Remember this. The bird was small and happy. The green door costs 57 coins. The train is busy "
    "in the morning. On Sunday the park looked tired. The otter walked along the deep river. They "
    "painted the bridge and cleaned the house. Nobody knew why the table was so heavy. The wooden "
    "gate leads to the soft field. It rained on the church all day. A hedgehog slept under the "
    "flower. The room was full of people. From the window you can see the moon.",

    "Where is the golden key?",

    "What is the secret code of the red box?",
};
static const char *demo_answer = "4821";                // to the last question
static const char *demo_methods = "streaming,snapkv,h2o,dililazy,sonic,loopserve,lychee,pats";

// Option values that show a method at work on a dialogue this short. Options that the user gives win.
static const char *demo_values[][2] = {
    { "lychee-buffer", "32" },
    { "lychee-kg", "2" },
    { "loopserve-min-context", "0" },
    { "loopserve-local", "8" },
    { "loopserve-alpha", "0.9" },
    { "loopserve-first", "4" },
    { "loopserve-interval", "4" },
    { "loopserve-obs", "16" },
    { "pats-window", "32" },
    { "pats-sink", "4" },
};
enum { DEMO_VALUES = sizeof demo_values / sizeof *demo_values };

// The default evaluation. An option that the user gives wins, and so does --budget or --ratio.
static const char *default_eval[][2] = {
    { "eval", "needle" },
    { "eval-items", "4" },                  // of these the depths 0, 30 and 90 %
    { "eval-length", "192,384" },
    { "budgets", "128" },                   // most methods' own budgets drop nothing of so short a text
};
enum { DEFAULT_EVALS = sizeof default_eval / sizeof *default_eval };

typedef struct {
    FILE *f, *csv;              // the page; its numbers
    App *a;
    Options *o;                 // of the demonstration
    Options *host;              // the same on the CPU: pictures 5 to 7 look into the memory of a session
    const char *chosen;         // the options of the default evaluation; "" when the user asked for one
    char *source;               // stb array, NUL-terminated: what stands under every picture (report_source)
    Turn *script;               // stb array (DEMO_TURNS): the dialogue with full attention's replies
    int pictures;               // drawn so far
} Report;

typedef struct {                // the demonstration through one method
    char name[160];
    char why[512];              // the reason why it was not played; empty: it was
    double stored[DEMO_TURNS];  // bytes of K and V held when a turn ends
    double read[DEMO_TURNS];    // bytes of K and V that a decode step of the turn reads, on average
    double seconds[PHASES][PHASE_PARTS];
    long tokens[PHASES];
    char *said;                 // stb array, NUL-terminated: its own answer to the last question
    Token *tok;                 // stb array (N): the tokens it has seen
    float *share;               // stb array (N): share of all L*H query heads that read it in the last step
} DemoRun;

// ---- text in a page and in the table of numbers

// Writes n bytes of s as text of a page. The five characters of markup become entities; control
// characters and bytes that are not UTF-8 become visible as <0xHH>.
static void html_bytes(FILE *f, const char *s, size_t n) {
    size_t i = 0;
    while (i < n) {
        int k = utf8_length(s + i, n - i);
        int c = (unsigned char)s[i];
        if (c == '&') fputs("&amp;", f);
        else if (c == '<') fputs("&lt;", f);
        else if (c == '>') fputs("&gt;", f);
        else if (c == '"') fputs("&quot;", f);
        else if (c == '\'') fputs("&#39;", f);
        else if (!k || (c < ' ' && c != '\n') || c == 127) fprintf(f, "&lt;0x%02X&gt;", (unsigned)c);
        else fwrite(s + i, 1, (size_t)k, f);
        i += k ? (size_t)k : 1;
    }
}

static void html_text(FILE *f, const char *s) { html_bytes(f, s, strlen(s)); }

// Writes s as text between two pieces of markup, which are written as they are.
static void html_between(FILE *f, const char *before, const char *s, const char *after) {
    fputs(before, f);
    html_text(f, s);
    fputs(after, f);
}

// Writes s as one field of a CSV line, in quotes where a comma, a quote or a line end in it asks
// for them.
static void csv_text(FILE *f, const char *s) {
    if (!strpbrk(s, ",\"\r\n")) {
        fputs(s, f);
        return;
    }
    putc('"', f);
    for (; *s; s++) {
        if (*s == '"') putc('"', f);
        putc(*s, f);
    }
    putc('"', f);
}

// Writes one line of numbers. `what` names x, y and value; lo and hi are an interval of value, or
// what `what` says.
static void csv_row(Report *r, const char *picture, const char *series, const char *what,
                    double x, double y, double value, double lo, double hi) {
    csv_text(r->csv, picture);
    putc(',', r->csv);
    csv_text(r->csv, series);
    putc(',', r->csv);
    csv_text(r->csv, what);
    fprintf(r->csv, ",%.6g,%.6g,%.6g,%.6g,%.6g\n", x, y, value, lo, hi);
}

// Appends the bytes of n tokens to the stb array `text`. A method's own tokens (negative ids) have
// none.
static char *token_bytes(const Report *r, char *text, const Token *t, int n) {
    for (int i = 0; i < n; i++) {
        int len = 0;
        const char *b = t[i].id >= 0 ? tokenizer_bytes(r->a->tok, t[i].id, &len) : NULL;
        if (b && len) memcpy(arraddnptr(text, len), b, (size_t)len);
    }
    return text;
}

// Writes n tokens as one text of the page, so that characters split over tokens stay whole.
static void tokens_text(Report *r, const Token *t, int n) {
    char *text = token_bytes(r, NULL, t, n);
    if (text) html_bytes(r->f, text, arrlenu(text));
    arrfree(text);
}

// ---- PNG images: a palette of 16 colours, four bits a pixel, stored (not compressed) deflate blocks

static const unsigned char viridis[SHADES][3] = {
    { 68, 1, 84 },    { 72, 26, 108 },  { 71, 47, 125 },  { 65, 68, 135 },
    { 57, 86, 140 },  { 49, 104, 142 }, { 42, 120, 142 }, { 35, 136, 142 },
    { 31, 152, 139 }, { 34, 168, 132 }, { 53, 183, 121 }, { 84, 197, 104 },
    { 122, 209, 81 }, { 165, 219, 54 }, { 210, 226, 27 }, { 253, 231, 37 },
};

// The CRC-32 that closes a PNG chunk. crc: that of the bytes that come earlier, 0 at the start.
static uint32_t crc32_of(uint32_t crc, const unsigned char *p, size_t n) {
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int b = 0; b < 8; b++) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1)));
    }
    return ~crc;
}

// The Adler-32 checksum that closes a zlib stream.
static uint32_t adler32_of(const unsigned char *p, size_t n) {
    uint32_t a = 1, b = 0;
    for (size_t i = 0; i < n; i++) {
        a = (a + p[i]) % 65521;
        b = (b + a) % 65521;
    }
    return b << 16 | a;
}

// Appends x as four bytes, highest first, to the stb array.
static unsigned char *big_endian(unsigned char *to, uint32_t x) {
    for (int shift = 24; shift >= 0; shift -= 8) arrput(to, (unsigned char)(x >> shift));
    return to;
}

// Appends one chunk to the stb array: length, type, data, and the CRC of type and data.
static unsigned char *png_chunk(unsigned char *png, const char *type, const unsigned char *data, size_t n) {
    png = big_endian(png, (uint32_t)n);
    size_t from = arrlenu(png);
    memcpy(arraddnptr(png, 4), type, 4);
    if (n) memcpy(arraddnptr(png, n), data, n);
    return big_endian(png, crc32_of(0, png + from, arrlenu(png) - from));
}

// The image's rows as PNG filters them: a byte 0 (no filter), then two pixels a byte, the left one
// in the high bits.
static unsigned char *png_rows(const unsigned char *pixel, int w, int h) {
    unsigned char *raw = NULL;
    for (int y = 0; y < h; y++) {
        const unsigned char *row = pixel + (size_t)y * w;
        arrput(raw, 0);
        for (int x = 0; x < w; x += 2) {
            int right = x + 1 < w ? row[x + 1] : 0;
            arrput(raw, (unsigned char)(row[x] << 4 | right));
        }
    }
    return raw;
}

// raw (n) as a zlib stream of stored blocks. A block is: 1 if it is the last, its length and the
// length's complement (two bytes each, lowest first), its bytes.
static unsigned char *zlib_stored(const unsigned char *raw, size_t n) {
    unsigned char *z = NULL;
    arrput(z, 0x78);
    arrput(z, 0x01);
    size_t at = 0;
    while (at < n) {
        size_t len = min_size(n - at, 65535);
        arrput(z, at + len == n);
        arrput(z, (unsigned char)len);
        arrput(z, (unsigned char)(len >> 8));
        arrput(z, (unsigned char)~len);
        arrput(z, (unsigned char)(~len >> 8));
        memcpy(arraddnptr(z, len), raw + at, len);
        at += len;
    }
    return big_endian(z, adler32_of(raw, n));
}

// The image file of pixel (h,w), values 0..15, as an stb array.
static unsigned char *png_make(const unsigned char *pixel, int w, int h) {
    unsigned char *raw = png_rows(pixel, w, h);
    unsigned char *z = zlib_stored(raw, arrlenu(raw));
    unsigned char *head = NULL, *png = NULL;
    head = big_endian(head, (uint32_t)w);
    head = big_endian(head, (uint32_t)h);
    memcpy(arraddnptr(head, 5), "\x04\x03\0\0\0", 5);   // 4 bits, palette

    memcpy(arraddnptr(png, 8), "\x89PNG\r\n\x1a\n", 8);
    png = png_chunk(png, "IHDR", head, 13);
    png = png_chunk(png, "PLTE", viridis[0], sizeof viridis);
    png = png_chunk(png, "IDAT", z, arrlenu(z));
    png = png_chunk(png, "IEND", NULL, 0);
    arrfree(raw);
    arrfree(z);
    arrfree(head);
    return png;
}

// Writes n bytes in base64: three bytes as four digits, '=' where bytes are missing at the end.
static void base64_write(FILE *f, const unsigned char *p, size_t n) {
    static const char *digit = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t second = i + 1 < n ? p[i + 1] : 0;
        uint32_t third = i + 2 < n ? p[i + 2] : 0;
        uint32_t u = (uint32_t)p[i] << 16 | second << 8 | third;
        putc(digit[u >> 18], f);
        putc(digit[u >> 12 & 63], f);
        putc(i + 1 < n ? digit[u >> 6 & 63] : '=', f);
        putc(i + 2 < n ? digit[u & 63] : '=', f);
    }
}

// ---- how a method looks
// A method has a colour, a marker and a way to draw its line, in every picture of every report. All
// three follow from its place in the table of methods (section 15), whatever else is shown. Markers
// differ between any two methods; colours come again, but not among the methods of the demonstration.
// A combination has the colour of its first part and the markers of all its parts side by side.

enum {
    COLOURS     = 8,            // beside full attention's, which is the text's
    SHAPES      = 11,
    MARK_PARTS  = 4,            // markers of a combination, at most
    MARK        = 12,           // units a marker is wide and tall
};

// The colours on a light and on a dark page. They lie near those of Okabe and Ito, so chosen that
// readers with any of the three kinds of colour blindness tell any two apart (Delta E of 14 or more),
// and they stand out from the page (contrast of 2.9 : 1 or more).
static const unsigned colour_of[COLOURS][2] = {
    { 0x0f46a2, 0x136acd },     // blue
    { 0xd48300, 0xec8e00 },     // orange
    { 0x0a9e59, 0x0cb66f },     // green
    { 0xda5b9a, 0xb46798 },     // purple
    { 0x8e161a, 0xbd4618 },     // vermilion
    { 0x4f86df, 0x51b8fb },     // sky blue
    { 0x916100, 0xfffc2a },     // yellow, on a light page brown
    { 0x563f48, 0xd1cfcf },     // grey
};

static const char *mark_shapes[SHAPES] = {
    "M-4.6 0a4.6 4.6 0 1 0 9.2 0a4.6 4.6 0 1 0 -9.2 0z",                                        // circle
    "M-4.2 -4.2h8.4v8.4h-8.4z",                                                                 // square
    "M0 -5.4L5.2 3.9H-5.2z",                                                                    // triangle up
    "M0 -5.7L5.7 0L0 5.7L-5.7 0z",                                                              // diamond
    "M0 5.4L5.2 -3.9H-5.2z",                                                                    // triangle down
    "M-5 -2.8L-2.8 -5L0 -2.2L2.8 -5L5 -2.8L2.2 0L5 2.8L2.8 5L0 2.2L-2.8 5L-5 2.8L-2.2 0z",      // cross
    "M0 -6L1.6 -2L5.7 -1.9L2.6 .9L3.5 4.9L0 2.7L-3.5 4.9L-2.6 .9L-5.7 -1.9L-1.6 -2z",           // star
    "M-1.7 -5.3h3.4v3.6h3.6v3.4h-3.6v3.6h-3.4v-3.6h-3.6v-3.4h3.6z",                             // plus
    "M-5.4 0L3.9 -5.2V5.2z",                                                                    // triangle left
    "M5.4 0L-3.9 -5.2V5.2z",                                                                    // triangle right
    "M-4.8 -5H4.8L-4.8 5H4.8z",                                                                 // hourglass
};

// The place of the method with this name of n bytes in the table; behind its end when there is none.
static int method_place(const char *name, size_t n) {
    const Method *m = method_find(name, n);
    int place = 0;
    while (methods[place] && methods[place] != m) place++;
    return place;
}

// The places of the parts of "A+B" -> how many.
static int name_places(const char *name, int place[MARK_PARTS]) {
    int n = 0;
    for (const char *p = name; n < MARK_PARTS; p++) {
        size_t len = strcspn(p, "+");
        place[n++] = method_place(p, len);
        p += len;
        if (!*p) break;
    }
    return n;
}

// The style class number of a place: 0 for full attention, else 1..COLOURS. The stride of 3 behind
// every tenth place is what keeps the demonstration's methods apart.
static int place_colour(int place) { return place ? 1 + (place + 3 * (place / 10)) % COLOURS : 0; }

// Of a method or a combination.
static int name_colour(const char *name) {
    int place[MARK_PARTS];
    name_places(name, place);
    return place_colour(place[0]);
}

// Units that a name's markers are wide.
static double mark_width(const char *name) {
    int place[MARK_PARTS];
    return MARK * name_places(name, place);
}

// Draws a name's markers around (x,y). Behind the first 11 places the shapes come again hollow, then
// hollow with a dot.
static void mark_draw(FILE *f, const char *name, double x, double y) {
    static const char *fill[] = { "", " hollow", " hollow" };
    static const char *dot = "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0z";
    int place[MARK_PARTS], n = name_places(name, place);
    for (int i = 0; i < n; i++) {
        int round = place[i] / SHAPES % 3;
        fprintf(f, "<path class=\"mark s%d%s\" transform=\"translate(%.1f %.1f)\" d=\"%s%s\"/>",
                place_colour(place[i]), fill[round], x + MARK * (i - (n - 1) / 2.), y,
                mark_shapes[place[i] % SHAPES], round == 2 ? dot : "");
    }
}

// The style classes of a name's line: full attention's is a wide band, that of a hollow marker is
// dashed, that of a combination has long and short dashes.
static const char *line_class(const char *name, char class[24]) {
    int place[MARK_PARTS], n = name_places(name, place);
    const char *dash = "";
    if (n > 1) dash = " mixed";
    else if (place[0] >= SHAPES) dash = " dashed";
    snprintf(class, 24, "s%d s%s", place_colour(place[0]), dash);
    return class;
}

// Writes a name with its markers before it, as part of a line of text.
static void marked_name(FILE *f, const char *name) {
    double w = mark_width(name) + 2;
    fprintf(f, "<span class=\"key\"><svg width=\"%g\" height=\"14\" viewBox=\"%g -7 %g 14\">", w, -w / 2, w);
    mark_draw(f, name, 0, 0);
    html_between(f, "</svg>", name, "</span>");
}

// ---- the page's style

static const char *report_style =
    // Colours of a light and of a dark screen.
    ":root{--bg:#fff;--fg:#1b1f24;--dim:#5c6670;--line:#d5dae0;--card:#f5f7f9;--kept:31,152,139;"
    "--ok:#11784f;--bad:#c23a20;color-scheme:light dark}\n"
    "@media (prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e3e7eb;--dim:#98a2ad;--line:#343b43;"
    "--card:#1d2227;--kept:18,134,118;--ok:#4cc492;--bad:#ff7a5c}}\n"

    // The page: headings, the explanation (how), remarks (note) and the command line (src) of a
    // picture.
    "body{background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif;max-width:72rem;"
    "margin:1.5rem auto;padding:0 1rem}\n"
    "section{border-top:1px solid var(--line);margin-top:2.5rem}"
    "h1{margin-bottom:.3rem;font-size:clamp(1.5rem,6vw,2rem)}"
    "h2{margin:1.2rem 0 .3rem}"
    "h3{font-size:1rem;margin:1rem 0 .3rem}\n"
    "p.how{max-width:60rem;margin:.2rem 0 .8rem}"
    "p.note{color:var(--dim);font-size:.9rem;overflow-wrap:anywhere}"
    "p.src{color:var(--dim);font-size:.75rem;overflow-wrap:anywhere}\n"
    "nav a{margin-right:1rem;display:inline-block}"
    "a{color:#2a88c8}"

    // Drawings, and a row of them.
    "svg{max-width:100%;height:auto}"
    "svg text{fill:var(--fg);font:12px system-ui,sans-serif}"
    "svg text.dim{fill:var(--dim)}\n"
    "svg .grid{stroke:var(--line);stroke-width:1;fill:none}"
    ".row{display:flex;flex-wrap:wrap;gap:1.5rem;align-items:flex-start}\n"

    // Tables: numbers right, text (t) left; a wide one scrolls.
    "table{border-collapse:collapse;font-size:.9rem;margin:.5rem 0}"
    "th,td{white-space:nowrap;padding:.2rem .6rem;border:1px solid var(--line);text-align:right;"
    "font-variant-numeric:tabular-nums}\n"
    "th{background:var(--card);font-weight:600}\n"
    "td.t,th.t{text-align:left;white-space:normal}"
    "caption{white-space:nowrap;text-align:left;font-weight:600;padding:.2rem 0}"
    "div.wide{overflow-x:auto}"
    "div.wide th,div.wide td{font-size:.8rem;padding:.2rem .4rem}"
    "div.wide td.t:last-child{min-width:12rem}"
    "div.wide th{white-space:normal}\n"
    "ul.legend{list-style:none;padding:0;margin:.4rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;"
    "font-size:.9rem}"
    "ul.legend svg{vertical-align:middle;margin-right:.4rem}"
    "ul.legend rect{stroke:var(--dim)}\n"

    // Lines and markers of a chart: s0 is full attention's wide band; markers have a rim of the page's
    // colour, hollow ones are filled with it.
    "path.s{fill:none;stroke:var(--c);stroke-width:2}"
    "path.s0.s{stroke-width:7;opacity:.28}"
    "path.dashed{stroke-dasharray:6 3}"
    "path.mixed{stroke-dasharray:9 3 2 3}\n"
    "path.mark{fill:var(--c);stroke:var(--bg);stroke-width:.8}"
    "path.mark.hollow{fill:var(--bg);stroke:var(--c);stroke-width:1.6}"
    "path.front{fill:none;stroke:var(--fg);stroke-dasharray:2 4;stroke-width:1.2;opacity:.8}"
    "path.bar{fill:none;stroke:var(--c);stroke-width:1.3;opacity:.75}\n"
    ".key{white-space:nowrap}"
    ".key svg{vertical-align:-.1em;margin-right:.35em;max-width:none}"

    // Charts side by side where two have room.
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:1rem 1.5rem}"
    ".charts h3{margin:.4rem 0}"
    "svg.chart{width:100%;display:block}"
    ".row table{margin:0}\n"

    // Picture 8, the coloured text: k0 is read by no head, b is the answer.
    ".tokens{background:var(--card);padding:.6rem .9rem;white-space:pre-wrap;overflow-wrap:anywhere;"
    "font-size:.85rem;line-height:1.55}\n"
    ".tokens .k0{color:var(--dim);opacity:.7}"
    ".tokens b{font-weight:600;border-bottom:3px solid #e0662a}\n"
    ".side{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));"
    "gap:0 1.5rem}\n"

    // Boxes of picture 9, the kinds of work: p0 attention, p1 choosing, p2 bookkeeping, p3 the rest.
    ".p0{fill:#2a78b5}"
    ".p1{fill:#e8a020}"
    ".p2{fill:#a02860}"
    ".p3{fill:var(--line)}"
    "rect{stroke:var(--bg);stroke-width:.6}\n"

    // Boxes of picture 5: b0 sign, b1 exponent, b2 mantissa, b3 what is cut, b4 padding; `off` is a
    // bit 0.
    ".b0{fill:#7b52ab}"
    ".b1{fill:#2a78b5}"
    ".b2{fill:#22a884}"
    ".b3{fill:var(--line)}"
    ".b4{fill:none;stroke:var(--dim);stroke-dasharray:3 2}"
    ".off{opacity:.45}\n"

    // Picture 6, the tree: branches that were read, skipped, or hold the answer (gold).
    ".tree{background:var(--card);padding:.6rem .9rem;font-size:.85rem}"
    ".tree details{margin:.15rem 0 .15rem 1.2rem}"
    ".tree summary{cursor:pointer}"
    ".tree p{margin:.15rem 0 .15rem 2.4rem}\n"
    ".tree i{display:inline-block;width:.9em;height:.9em;border-radius:.2em;margin-right:.4em;"
    "vertical-align:-.1em;outline:1px solid var(--dim)}\n"
    "@media (max-width:40rem){.tree{padding:.4rem}.tree details{margin-left:.5rem}"
    ".tree p{margin-left:1rem}}\n"
    ".tree .read{font-weight:600}"
    ".tree .gold{border-bottom:3px solid #e0662a}"
    ".tree .skip{color:var(--dim)}\n"

    // Picture 7, the maps: all of them small, or with the script (one) a single large one.
    ".maps{display:flex;flex-wrap:wrap;gap:.8rem}"
    ".maps figure{margin:0;width:min(20rem,100%)}"
    ".maps figcaption{font-size:.75rem;line-height:1.3}"
    ".maps svg{width:100%;display:block}\n"
    ".maps.one figure{display:none;width:min(40rem,100%)}"
    ".maps.one figure.on{display:block}"
    ".maps.one figcaption{font-size:.9rem}"
    ".maps image{image-rendering:pixelated}\n"
    ".maps .void{fill:var(--bg)}"
    ".maps .line{fill:#fff;fill-opacity:.12;stroke:#fff;stroke-width:.8;stroke-opacity:.8;"
    "vector-effect:non-scaling-stroke}\n"
    ".maps .whole{fill-opacity:.08;stroke-dasharray:3 3;stroke-opacity:.8}"
    "svg text.tick{font-size:9px}"
    "#lines:not(:checked)~.maps .line{display:none}\n"
    ".sliders{display:none}"
    ".js .sliders{display:flex;flex-wrap:wrap;gap:.4rem 1.5rem;margin:.4rem 0}"
    ".sliders input{vertical-align:middle;width:14rem}"

    // Right and wrong answers.
    ".ok{color:var(--ok)}"
    ".bad{color:var(--bad)}\n";

// Writes the style classes of the methods' colours (s0 full attention, s1..s8) on a light page, and
// behind them those of a dark one.
static void report_colours(FILE *f) {
    fprintf(f, ".s0{--c:var(--fg)}");
    for (int dark = 0; dark < 2; dark++) {
        if (dark) fprintf(f, "@media (prefers-color-scheme:dark){");
        for (int i = 0; i < COLOURS; i++) fprintf(f, ".s%d{--c:#%06x}", i + 1, colour_of[i][dark]);
        fprintf(f, dark ? "}\n" : "\n");
    }
}

// Writes the style classes of the colour scales: v0..v15 viridis, with the colour of text on it;
// k1..k8 for the share of heads that read a token (picture 8).
static void report_shades(FILE *f) {
    for (int i = 0; i < SHADES; i++) {
        const unsigned char *v = viridis[i];
        fprintf(f, ".v%d{fill:#%02x%02x%02x;", i, v[0], v[1], v[2]);
        fprintf(f, "background:#%02x%02x%02x}%s", v[0], v[1], v[2], i % 4 == 3 ? "\n" : "");
    }
    fprintf(f, "svg text.on-dark{fill:#fff}svg text.on-light{fill:#111}");
    fprintf(f, "td.on-dark{color:#fff}td.on-light{color:#111}\n");
    for (int i = 1; i <= TEXT_SHADES; i++)
        fprintf(f, ".k%d{background:rgba(var(--kept),%.3g)}", i, .12 + .68 * i / TEXT_SHADES);
    fputc('\n', f);
}

// The colour of text on a viridis shade.
static const char *shade_text(int shade) { return shade < 9 ? "on-dark" : "on-light"; }

// ---- the frame of a picture: heading, explanation, remarks, source; panels and legends inside it

// Opens the section `id` with its number, its title and how to read it.
static void picture_begin(Report *r, const char *id, const char *title, const char *how) {
    fprintf(r->f, "<section id=\"%s\">\n<h2>%d. ", id, ++r->pictures);
    html_between(r->f, "", title, "</h2>\n");
    html_between(r->f, "<p class=\"how\">", how, "</p>\n");
}

static void picture_end(Report *r) {
    html_between(r->f, "<p class=\"src\">", r->source, "</p>\n</section>\n");
}

// Writes one plain sentence below a picture, or in place of one that could not be drawn.
KV_PRINTF(2, 3) static void picture_note(Report *r, const char *fmt, ...) {
    char text[4096];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    html_between(r->f, "<p class=\"note\">", text, "</p>\n");
}

// Opens one of several drawings of a picture, under its own small heading.
static void panel_begin(FILE *f, const char *title) {
    html_between(f, "<div><h3>", title, "</h3>");
}

// Opens a drawing of w by h units, of a style class.
static void svg_begin(FILE *f, const char *class, int w, int h) {
    fprintf(f, "<svg class=\"%s\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n",
            class, w, h, w, h);
}

static void legend_begin(FILE *f) { fprintf(f, "<ul class=\"legend\">\n"); }
static void legend_end(FILE *f) { fprintf(f, "</ul>\n"); }

// A legend's entry: a small box of a style class, and its name.
static void legend_box(FILE *f, const char *class, const char *name) {
    fprintf(f, "<li><svg width=\"16\" height=\"12\">"
               "<rect class=\"%s\" x=\"1\" y=\"1\" width=\"14\" height=\"10\"/></svg>", class);
    html_between(f, "", name, "</li>\n");
}

// A legend's entry for colour `shade` of the viridis scale.
static void legend_shade(FILE *f, int shade, const char *name) {
    char class[16];
    snprintf(class, sizeof class, "v%d", shade);
    legend_box(f, class, name);
}

// ---- a chart of lines: x linear or logarithmic, y linear from 0
// Nothing covers anything else: what is written or marked notes its box, and what comes later takes a
// free place near its own.

typedef struct {                // one point
    double x, y;
    double lo, hi;              // error bar, if lo < hi
    char what[32];              // written beside the point
} Spot;

typedef struct {
    const char *name;           // a method's, where the chart has markers
    int colour;                 // style class of the line where the chart has no markers
    Spot *spot;                 // stb array, in the order of the line
} Series;

enum {                          // where markers stand
    MARKS_NONE,
    MARKS_POINTS,               // at the points
    MARKS_BETWEEN,              // between them, in every series elsewhere: lines may lie on each other
};

typedef struct {
    const char *x_name, *y_name;
    int log_x;
    int bytes_x, bytes_y;       // 1: the axis is labelled in KiB, MiB, ..
    int marks;                  // MARKS_*
    double y_top;               // upper end of y; 0: by the data
} Axes;

typedef struct { double x0, y0, x1, y1; } Box;

typedef struct {                // the ranges shown, and what is taken
    const Axes *ax;
    double x0, x1, y1;
    Box *taken;                 // stb array
} Frame;

enum { CHART_W = 420, CHART_H = 300 };                  // units of a chart, and of its margins
enum { CHART_LEFT = 62, CHART_RIGHT = 16, CHART_TOP = 30, CHART_BOTTOM = 46 };
enum { LETTER = 8 };                                    // units of a digit's width, at most

// The distance of grid lines, 1, 2 or 5 times a power of ten, that cuts `range` into about n parts.
static double nice_step(double range, int n) {
    double p = pow(10, floor(log10(range / n)));
    double k = range / n / p;
    if (k < 1.5) return p * 1;
    if (k < 3.5) return p * 2;
    if (k < 7.5) return p * 5;
    return p * 10;
}

// The column of x. On a logarithmic axis what lies left of x0, and 0, stands at the left end.
static double chart_x(const Frame *c, double x) {
    double share = (x - c->x0) / (c->x1 - c->x0);
    if (c->ax->log_x) share = log(fmax(x, c->x0) / c->x0) / log(c->x1 / c->x0);
    return CHART_LEFT + share * (CHART_W - CHART_LEFT - CHART_RIGHT);
}

// The row of y.
static double chart_y(const Frame *c, double y) {
    return CHART_H - CHART_BOTTOM - y / c->y1 * (CHART_H - CHART_BOTTOM - CHART_TOP);
}

// Is there nothing in the box yet, and is it inside the chart?
static int box_free(const Frame *c, Box b) {
    if (b.x0 < 0 || b.x1 > CHART_W || b.y0 < 0 || b.y1 > CHART_H) return 0;
    for (int i = 0; i < (int)arrlen(c->taken); i++) {
        const Box *t = &c->taken[i];
        if (b.x0 < t->x1 && t->x0 < b.x1 && b.y0 < t->y1 && t->y0 < b.y1) return 0;
    }
    return 1;
}

// The ranges that hold all points of n series: 5 % of room above, 30 % on both sides of a
// logarithmic x.
static Frame chart_frame(const Axes *ax, const Series *s, int n) {
    Frame c = { ax, INFINITY, -INFINITY, ax->y_top, NULL };
    for (int i = 0; i < n; i++)
        for (int j = 0; j < (int)arrlen(s[i].spot); j++) {
            const Spot *p = &s[i].spot[j];
            if (!ax->log_x || p->x > 0) {
                c.x0 = fmin(c.x0, p->x);
                c.x1 = fmax(c.x1, p->x);
            }
            if (!ax->y_top) c.y1 = fmax(c.y1, 1.05 * fmax(p->y, p->hi));
        }
    if (c.x0 > c.x1) {                                  // no point at all
        c.x0 = 1;
        c.x1 = 1;
    }
    if (ax->log_x) {
        c.x0 /= 1.3;
        c.x1 *= 1.3;
    }
    if (c.x0 == c.x1) c.x1 += 1;
    if (!(c.y1 > 0)) c.y1 = 1;
    return c;
}

// The label of a grid line at x: bytes with their unit, or the plain number.
static void tick_label(double x, int bytes, char b[32]) {
    if (bytes) human_bytes(x, b);
    else snprintf(b, 32, "%g", x);
}

// A vertical grid line with its label below, if there is room for the label.
static void tick_x(FILE *f, Frame *c, double x) {
    char b[32];
    double at = chart_x(c, x);
    tick_label(x, c->ax->bytes_x, b);
    double half = LETTER * (double)strlen(b) / 2;
    Box box = { at - half, CHART_H - CHART_BOTTOM + 7, at + half, CHART_H - CHART_BOTTOM + 19 };
    fprintf(f, "<path class=\"grid\" d=\"M%.1f %dV%d\"/>", at, CHART_TOP, CHART_H - CHART_BOTTOM);
    if (!box_free(c, box)) return;
    arrput(c->taken, box);
    fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
            at, CHART_H - CHART_BOTTOM + 17, b);
}

// A horizontal grid line with its label on the left.
static void tick_y(FILE *f, const Frame *c, double y) {
    char b[32];
    double at = chart_y(c, y);
    tick_label(y, c->ax->bytes_y, b);
    fprintf(f, "<path class=\"grid\" d=\"M%d %.1fH%d\"/>", CHART_LEFT, at, CHART_W - CHART_RIGHT);
    fprintf(f, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", CHART_LEFT - 8, at + 4, b);
}

// The vertical grid lines of a logarithmic axis: 1, 2, 5 times the powers of ten; over two decades
// the powers only; equal steps where the ends are so near each other that few powers lie between.
static void ticks_log(FILE *f, Frame *c) {
    static const int mark[] = { 1, 2, 5 };
    int marks = c->x1 / c->x0 > 100 ? 1 : 3;
    if (c->x1 / c->x0 < 5) {
        double step = nice_step(c->x1 - c->x0, 4);
        for (double x = ceil(c->x0 / step) * step; x <= c->x1; x += step) tick_x(f, c, x);
        return;
    }
    for (int k = (int)floor(log10(c->x0)); k <= log10(c->x1); k++)
        for (int i = 0; i < marks; i++) {
            double x = mark[i] * pow(10, k);
            if (x >= c->x0 && x <= c->x1) tick_x(f, c, x);
        }
}

// The grid and the names of both axes, that of y above it.
static void chart_grid(FILE *f, Frame *c) {
    double step = nice_step(c->y1, 5);
    for (int i = 0; i * step <= c->y1 * 1.0001; i++) tick_y(f, c, i * step);
    if (c->ax->log_x) {
        ticks_log(f, c);
    } else {
        step = nice_step(c->x1 - c->x0, 8);
        for (double x = ceil(c->x0 / step) * step; x <= c->x1 * 1.0001; x += step) tick_x(f, c, x);
    }
    fprintf(f, "<text class=\"dim\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">",
            (CHART_LEFT + CHART_W - CHART_RIGHT) / 2, CHART_H - 8);
    html_between(f, "", c->ax->x_name, "</text>\n");
    html_between(f, "<text class=\"dim\" x=\"4\" y=\"13\">", c->ax->y_name, "</text>\n");
}

// Moves the box of a marker to the nearest free place, if there is one within some markers' widths:
// to the side, or (tall 0) also up or down.
static void box_settle(const Frame *c, Box *b, int tall) {
    Box best = *b;
    double least = INFINITY;
    for (int up = tall ? 0 : -1; up <= (tall ? 0 : 1); up++)
        for (int k = -12; k <= 12; k++) {
            double dx = k * MARK / 2., dy = up * MARK;
            Box at = { b->x0 + dx, b->y0 + dy, b->x1 + dx, b->y1 + dy };
            if (dx * dx + dy * dy >= least || !box_free(c, at)) continue;
            best = at;
            least = dx * dx + dy * dy;
        }
    *b = best;
}

// Draws a series' markers at (*x,*y), with a title to hover over: the name, `what`, the value. The
// error bar from lo to hi goes with them. Where the place is taken they move a little, and a line
// leads to the place. *x, *y become where they stand.
static void chart_mark(FILE *f, Frame *c, const Series *s, const Spot *p, double *x, double *y) {
    double half = mark_width(s->name) / 2 - .5, tall = MARK / 2. - .5;
    double lo = *y, hi = *y, x0 = *x, y0 = *y;
    int bar = p->lo < p->hi;
    if (bar) {
        hi = chart_y(c, p->hi);
        lo = chart_y(c, p->lo);
    }
    double above = fmax(tall, *y - hi), below = fmax(tall, lo - *y);
    Box box = { *x - half, *y - above, *x + half, *y + below };
    box_settle(c, &box, bar);
    arrput(c->taken, box);
    *x = box.x0 + half;
    *y = box.y0 + above;

    char value[32];
    int colour = name_colour(s->name);
    tick_label(p->y, c->ax->bytes_y, value);
    fprintf(f, "<g>");
    if (bar)
        fprintf(f, "<path class=\"bar s%d\" d=\"M%.1f %.1fV%.1fM%.1f %.1fh6M%.1f %.1fh6\"/>",
                colour, *x, lo, hi, *x - 3, lo, *x - 3, hi);
    if (fabs(*x - x0) + fabs(*y - y0) > .1)
        fprintf(f, "<path class=\"bar s%d\" d=\"M%.1f %.1fL%.1f %.1f\"/>", colour, x0, y0, *x, *y);
    mark_draw(f, s->name, *x, *y);
    html_between(f, "<title>", s->name, "");
    fprintf(f, " %s: %s</title></g>\n", p->what, value);
}

// Writes the text of a point whose markers stand at (x,y), where there is room beside them.
static void chart_label(FILE *f, Frame *c, const Series *s, const Spot *p, double x, double y) {
    double side = mark_width(s->name) / 2, wide = LETTER * (double)strlen(p->what);
    static const double rise[] = { 0, -9, 9 };
    for (int i = 0; i < 6; i++) {                       // right, left; then above, below
        int left = i % 2;
        double from = left ? x - side - wide : x + side, row = y + rise[i / 2];
        Box box = { from, row - 5.5, from + wide, row + 5.5 };
        if (!box_free(c, box)) continue;
        arrput(c->taken, box);
        fprintf(f, "<text class=\"dim\" x=\"%.1f\" y=\"%.1f\"%s>%s</text>\n", left ? x - side : x + side,
                row + 4, left ? " text-anchor=\"end\"" : "", p->what);
        return;
    }
}

// A series' line.
static void chart_line(FILE *f, const Frame *c, const Series *s) {
    char class[24];
    if (c->ax->marks) line_class(s->name, class);
    else snprintf(class, sizeof class, "s%d s", s->colour);
    fprintf(f, "<path class=\"%s\" d=\"", class);
    for (int j = 0; j < (int)arrlen(s->spot); j++) {
        const Spot *p = &s->spot[j];
        fprintf(f, "%s%.1f %.1f", j ? "L" : "M", chart_x(c, p->x), chart_y(c, p->y));
    }
    fprintf(f, "\"/>\n");
}

// The markers of n series at their points; behind them the points' texts.
static void marks_at_points(FILE *f, Frame *c, const Series *s, int n) {
    double *at = NULL;                                  // stb array: x and y of every marker
    int k = 0;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < (int)arrlen(s[i].spot); j++) {
            const Spot *p = &s[i].spot[j];
            double x = chart_x(c, p->x), y = chart_y(c, p->y);
            chart_mark(f, c, &s[i], p, &x, &y);
            arrput(at, x);
            arrput(at, y);
        }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < (int)arrlen(s[i].spot); j++, k += 2) {
            const Spot *p = &s[i].spot[j];
            if (*p->what) chart_label(f, c, &s[i], p, at[k], at[k + 1]);
        }
    arrfree(at);
}

// The markers of n series between every other two points: series i at the share (i + 1/2) / n of the
// way. A marker whose place is taken is left out, but not a series' last chance to have one.
static void marks_between(FILE *f, Frame *c, const Series *s, int n) {
    for (int i = 0; i < n; i++) {
        int points = (int)arrlen(s[i].spot), drawn = 0;
        double share = (i + .5) / n, half = mark_width(s[i].name) / 2;
        for (int j = i % 2; j + 1 < points; j += 2) {
            const Spot *p = &s[i].spot[j];
            double x0 = chart_x(c, p[0].x), x1 = chart_x(c, p[1].x), x = x0 + share * (x1 - x0);
            double y0 = chart_y(c, p[0].y), y1 = chart_y(c, p[1].y), y = y0 + share * (y1 - y0);
            Box box = { x - half, y - 5.5, x + half, y + 5.5 };
            int last = j + 3 >= points;
            if (!box_free(c, box) && (drawn || !last)) continue;
            chart_mark(f, c, &s[i], p, &x, &y);
            drawn = 1;
        }
    }
}

// A dashed staircase through the points of a frontier (stb array), on to the right end.
static void chart_front(FILE *f, const Frame *c, const Spot *front) {
    fprintf(f, "<path class=\"front\" d=\"");
    for (int i = 0; i < (int)arrlen(front); i++)
        fprintf(f, i ? "H%.1fV%.1f" : "M%.1f %.1f", chart_x(c, front[i].x), chart_y(c, front[i].y));
    fprintf(f, "H%d\"/>\n", CHART_W - CHART_RIGHT);
}

// Draws n series. front: stb array of a frontier's points, or NULL.
static void chart(FILE *f, const Axes *ax, const Series *s, int n, const Spot *front) {
    Frame c = chart_frame(ax, s, n);
    svg_begin(f, "chart", CHART_W, CHART_H);
    chart_grid(f, &c);
    if (front) chart_front(f, &c, front);
    for (int i = 0; i < n; i++) chart_line(f, &c, &s[i]);
    if (ax->marks == MARKS_POINTS) marks_at_points(f, &c, s, n);
    if (ax->marks == MARKS_BETWEEN) marks_between(f, &c, s, n);
    fprintf(f, "</svg>\n");
    arrfree(c.taken);
}

// The legend of n series: a piece of each line, with its markers if the chart has them.
static void legend_lines(FILE *f, const Series *s, int n, int marks) {
    char class[24];
    legend_begin(f);
    for (int i = 0; i < n; i++) {
        double w = marks ? mark_width(s[i].name) + 26 : 34;
        if (marks) line_class(s[i].name, class);
        else snprintf(class, sizeof class, "s%d s", s[i].colour);
        fprintf(f, "<li><svg width=\"%g\" height=\"14\"><path class=\"%s\" d=\"M1 7H%g\"/>", w, class, w - 1);
        if (marks) mark_draw(f, s[i].name, w / 2, 7);
        html_between(f, "</svg>", s[i].name, "</li>\n");
    }
    legend_end(f);
}

static void series_free(Series *s) {
    for (int i = 0; i < (int)arrlen(s); i++) arrfree(s[i].spot);
    arrfree(s);
}

// ---- 1 and 2: what was evaluated

// Describes the answers (stb array) to one task: "needle (8 texts of 192 to 384 tokens, 40 answers)".
// The answers of a text stand side by side.
static void task_text(char text[160], const Answer *x, const char *task) {
    int texts = 0, answers = 0, item = -1, least = 0, most = 0;
    for (int i = 0; i < (int)arrlen(x); i++) {
        if (strcmp(x[i].task, task)) continue;
        if (!answers || x[i].item != item) texts++;
        least = answers ? min_int(least, x[i].length) : x[i].length;
        most = max_int(most, x[i].length);
        item = x[i].item;
        answers++;
    }
    int n = snprintf(text, 160, "%.60s (%d text%s of %d", task, texts, texts == 1 ? "" : "s", least);
    if (most > least) n += snprintf(text + n, 160 - (size_t)n, " to %d", most);
    snprintf(text + n, 160 - (size_t)n, " tokens, %d answer%s)", answers, answers == 1 ? "" : "s");
}

// The sentences below the scores: what was evaluated, on how many items, and how to do it
// again when the program chose it.
static void evaluated_note(Report *r, const Score *rows) {
    char text[1024] = "", task[160];
    const Score *s = &rows[0];
    for (int i = 0; i < (int)arrlen(s->answers); i++) {
        size_t n = strlen(text);
        if (!first_of_task(s->answers, i)) continue;
        task_text(task, s->answers, s->answers[i].task);
        snprintf(text + n, sizeof text - n, "%s%s", n ? ", " : "", task);
    }
    if (!arrlen(s->answers)) snprintf(text, sizeof text, "%ld tokens of a text predicted", s->predicted);
    picture_note(r, "What was evaluated: %s; %d item%s through each of %d rows of the table. %s%s",
                 text, s->items, s->items == 1 ? "" : "s", (int)arrlen(rows),
                 *r->chosen ? "No evaluation was asked for, so this is the default one, without KLD: " : "",
                 r->chosen);
}

// What stands in place of a picture of scores that were not measured.
static void not_evaluated_note(Report *r) {
    picture_note(r, "No scores were measured%s%s. Give --eval TASK (and --compare METHODS --budgets LIST) together "
                    "with --report.", *r->chosen ? ": " : "", r->chosen);
}

// ---- 1: quality against bytes
// Two charts with a line a method and a marker a budget: x is bytes (logarithmic), held on the left,
// read for one new token on the right. y is the mean score with its 95 % interval, or KL
// divergence, or perplexity; a table of all columns follows.

enum { BY_SCORE, BY_KLD, BY_PPL };                      // what y is
static const char *report_metrics[] = {
    "mean score (0 to 1; higher is better)",
    "KL divergence from full (nats; lower is better)",
    "perplexity (lower is better)",
};

// BY_*: scores if any row has answers, else the divergence if any was measured, else perplexity.
static int rows_metric(const Score *rows) {
    int metric = BY_PPL;
    for (int i = 0; i < (int)arrlen(rows); i++) {
        if (arrlen(rows[i].answers)) return BY_SCORE;
        if (rows[i].kld > 0) metric = BY_KLD;
    }
    return metric;
}

// The mean score of the answers (stb array) of one task (NULL: of all) and of one place of the
// question (-1: of all). -1 if there are none.
static double report_mean(const Answer *x, const char *task, int position) {
    double sum = 0;
    int n = 0;
    for (int i = 0; i < (int)arrlen(x); i++) {
        if (task && strcmp(task, x[i].task)) continue;
        if (position >= 0 && position != x[i].position) continue;
        sum += x[i].score;
        n++;
    }
    return n ? sum / n : -1;
}

// The height of a row's point: mean score, nats a token, or perplexity.
static double row_quality(const Score *s, int metric) {
    double n = s->predicted ? (double)s->predicted : 1;
    if (metric == BY_SCORE) return fmax(0, report_mean(s->answers, NULL, -1));
    if (metric == BY_KLD) return s->kld / n;
    return exp(s->nll / n);
}

// Bytes of an item, on average: read by a decode step (read 1), or held at the end (read 0).
static double row_bytes(const Score *s, int read) {
    return (read ? s->attended : s->stored) / (s->items ? s->items : 1);
}

// The budget to print beside a row's name; 0 for full attention, which has none.
static int row_budget(const Score *s) { return strcmp(s->name, "full") ? s->budget : 0; }

static int spot_order(const void *a, const void *b) {
    const Spot *p = a, *q = b;
    return (p->x > q->x) - (p->x < q->x);
}

// The points of n series that nothing cheaper beats, by rising x (stb array). higher 1: more y is
// better.
static Spot *frontier(const Series *s, int n, int higher) {
    Spot *all = NULL, *best = NULL;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < (int)arrlen(s[i].spot); j++) arrput(all, s[i].spot[j]);
    if (all) qsort(all, arrlen(all), sizeof *all, spot_order);

    for (int i = 0; i < (int)arrlen(all); i++) {
        if (!arrlen(best)) {
            arrput(best, all[i]);
            continue;
        }
        int better = higher ? all[i].y > arrlast(best).y : all[i].y < arrlast(best).y;
        if (better && arrlast(best).x == all[i].x) arrlast(best) = all[i];
        else if (better) arrput(best, all[i]);
    }
    arrfree(all);
    return best;
}

// The place of a method's series; a new one is appended when the name is new.
static int series_of(Series **s, const char *name) {
    int k = 0;
    while (k < (int)arrlen(*s) && strcmp((*s)[k].name, name)) k++;
    if (k < (int)arrlen(*s)) return k;
    Series one = { .name = name };
    arrput(*s, one);
    return k;
}

// Do two rows have different budgets?
static int budgets_differ(const Score *rows) {
    int budget = 0;
    for (int i = 0; i < (int)arrlen(rows); i++) {
        if (!row_budget(&rows[i])) continue;
        if (budget && budget != row_budget(&rows[i])) return 1;
        budget = row_budget(&rows[i]);
    }
    return 0;
}

// One series a method, with its budgets as points (stb array). The budget is written beside a point,
// unless it is the same one everywhere. read: as in row_bytes.
static Series *score_series(Report *r, const Score *rows, int metric, int read) {
    Series *s = NULL;
    int differ = budgets_differ(rows);
    for (int i = 0; i < (int)arrlen(rows); i++) {
        const Score *row = &rows[i];
        int k = series_of(&s, row->name);
        Spot p = { .x = row_bytes(row, read), .y = row_quality(row, metric) };
        if (interval_allowed(row->answers, (int)arrlen(row->answers))) {
            p.lo = row->lo;
            p.hi = row->hi;
        }
        if (row_budget(row) && differ) snprintf(p.what, sizeof p.what, "%d", row->budget);
        arrput(s[k].spot, p);
        csv_row(r, "pareto", row->name, read ? "bytes read a step, score" : "bytes stored, score",
                p.x, row->budget, p.y, row->lo, row->hi);
    }
    return s;
}

// The table below the charts has a column for every task, for every place of the question, and for
// what was measured at all.
enum {
    COL_QUALITY,                // row_quality
    COL_INTERVAL,               // 95 % interval of the mean score
    COL_MEAN,                   // mean score of one task, or of one place of the question
    COL_KLD,                    // nats a token
    COL_STORED,                 // bytes held at the end of an item
    COL_SHARE,                  // the same in per cent of full attention's
    COL_READ,                   // bytes read by a decode step
    COL_PEAK,                   // most bytes ever held
    COL_PREFILL,                // seconds
    COL_DECODE,                 // tokens a second
};
typedef struct {
    const char *name;
    int kind;                   // COL_*
    const char *task;           // of COL_MEAN, as in report_mean
    int position;
} TableColumn;

// Appends a column unless there is one of that name.
static TableColumn *table_column(TableColumn *c, const char *name, int kind, const char *task, int position) {
    for (int i = 0; i < (int)arrlen(c); i++)
        if (!strcmp(c[i].name, name)) return c;
    TableColumn one = { name, kind, task, position };
    arrput(c, one);
    return c;
}

// Appends a column for every task, in order of appearance, if there is more than one task.
static TableColumn *task_columns(TableColumn *c, const Score *rows) {
    TableColumn *tasks = NULL;
    for (int i = 0; i < (int)arrlen(rows); i++)
        for (int j = 0; j < (int)arrlen(rows[i].answers); j++) {
            const char *task = rows[i].answers[j].task;
            tasks = table_column(tasks, task, COL_MEAN, task, -1);
        }
    if (arrlen(tasks) > 1)
        for (int i = 0; i < (int)arrlen(tasks); i++) arrput(c, tasks[i]);
    arrfree(tasks);
    return c;
}

// Appends a column for every place of the question that an answer has.
static TableColumn *place_columns(TableColumn *c, const Score *rows) {
    static const char *place[] = { "asked first", "asked amid", "asked last" };
    for (int i = 0; i < (int)arrlen(rows); i++)
        for (int j = 0; j < (int)arrlen(rows[i].answers); j++) {
            int p = rows[i].answers[j].position;
            if (p >= 0 && p < 3) c = table_column(c, place[p], COL_MEAN, NULL, p);
        }
    return c;
}

// The columns of the table (stb array).
static TableColumn *table_columns(const Score *rows, int metric) {
    static const char *quality[] = { "mean score", "KLD (nats)", "perplexity" };       // by BY_*
    TableColumn *c = NULL;
    int spread = 0, kld = 0;
    for (int i = 0; i < (int)arrlen(rows); i++) {
        spread |= rows[i].lo < rows[i].hi;
        kld |= rows[i].kld > 0;
    }
    c = table_column(c, quality[metric], COL_QUALITY, NULL, -1);
    if (spread) c = table_column(c, "95 % interval", COL_INTERVAL, NULL, -1);
    c = task_columns(c, rows);
    c = place_columns(c, rows);
    if (kld) c = table_column(c, "KLD (nats)", COL_KLD, NULL, -1);
    c = table_column(c, "held", COL_STORED, NULL, -1);
    c = table_column(c, "of full", COL_SHARE, NULL, -1);
    c = table_column(c, "read a step", COL_READ, NULL, -1);
    c = table_column(c, "peak", COL_PEAK, NULL, -1);
    c = table_column(c, "prefill s", COL_PREFILL, NULL, -1);
    c = table_column(c, "tok/s", COL_DECODE, NULL, -1);
    return c;
}

// The mean score of a COL_MEAN column; empty where the row has no such answer.
static void mean_cell(const Score *s, const TableColumn *c, char b[32]) {
    double x = report_mean(s->answers, c->task, c->position);
    *b = 0;
    if (x >= 0) snprintf(b, 32, "%.3f", x);
}

// The text of one cell.
static void score_cell(const Score *s, const TableColumn *c, int metric, char b[32]) {
    double n = s->predicted ? (double)s->predicted : 1;
    double full = s->full > 0 ? s->full : 1;
    switch (c->kind) {
    case COL_QUALITY:  snprintf(b, 32, metric == BY_KLD ? "%.5f" : "%.3f", row_quality(s, metric)); break;
    case COL_INTERVAL:
        if (interval_allowed(s->answers, (int)arrlen(s->answers))) snprintf(b, 32, "%.3f to %.3f", s->lo, s->hi);
        else snprintf(b, 32, "-");
        break;
    case COL_MEAN:     mean_cell(s, c, b); break;
    case COL_KLD:      snprintf(b, 32, "%.5f", s->kld / n); break;
    case COL_STORED:   human_bytes(row_bytes(s, 0), b); break;
    case COL_SHARE:    snprintf(b, 32, "%.1f %%", 100 * s->stored / full); break;
    case COL_READ:     human_bytes(row_bytes(s, 1), b); break;
    case COL_PEAK:     human_bytes(s->peak, b); break;
    case COL_PREFILL:  snprintf(b, 32, "%.2f", s->prefill_s); break;
    case COL_DECODE:   snprintf(b, 32, "%.0f", rate((long)s->n_decode, s->decode_s)); break;
    }
}

// The table: a line for every method and budget.
static void score_table(Report *r, const Score *rows, int metric) {
    TableColumn *c = table_columns(rows, metric);
    char b[32];
    fprintf(r->f, "<div class=\"wide\"><table><tr><th class=\"t\">method</th><th>budget</th>");
    for (int k = 0; k < (int)arrlen(c); k++) html_between(r->f, "<th>", c[k].name, "</th>");
    fprintf(r->f, "</tr>\n");
    for (int i = 0; i < (int)arrlen(rows); i++) {
        const Score *row = &rows[i];
        fprintf(r->f, "<tr><td class=\"t\">");
        marked_name(r->f, row->name);
        fprintf(r->f, "</td><td>");
        if (row_budget(row)) fprintf(r->f, "%d", row->budget);
        fprintf(r->f, "</td>");
        for (int k = 0; k < (int)arrlen(c); k++) {
            score_cell(row, &c[k], metric, b);
            fprintf(r->f, "<td>%s</td>", b);
            if (c[k].kind == COL_MEAN && *b)
                csv_row(r, "scores", row->name, c[k].name, row->budget, 0, atof(b), 0, 0);
        }
        fprintf(r->f, "</tr>\n");
    }
    fprintf(r->f, "</table></div>\n");
    arrfree(c);
}

// The two charts, the legend they share, and the table.
static void pareto_charts(Report *r, const Score *rows) {
    int metric = rows_metric(rows);
    Axes ax = { .y_name = report_metrics[metric], .log_x = 1, .bytes_x = 1, .marks = MARKS_POINTS };
    if (metric == BY_SCORE) ax.y_top = 1.06;
    fprintf(r->f, "<div class=\"charts\">\n");
    for (int read = 0; read < 2; read++) {
        Series *s = score_series(r, rows, metric, read);
        Spot *front = frontier(s, (int)arrlen(s), metric == BY_SCORE);
        ax.x_name = read ? "bytes read per decode step (log scale)"
                         : "bytes of K and V held after a dialogue (log scale)";
        chart(r->f, &ax, s, (int)arrlen(s), front);
        if (read) {
            fprintf(r->f, "</div>\n");
            legend_lines(r->f, s, (int)arrlen(s), 1);
        }
        arrfree(front);
        series_free(s);
    }
    score_table(r, rows, metric);
}

static void draw_pareto(Report *r, const Score *rows) {
    int up = rows_metric(rows) == BY_SCORE || !arrlen(rows);
    char how[800];
    snprintf(how, sizeof how,
             "Each point is one method at one budget%s. Good is left and %s. Bars, if there are any, "
             "are 95 %% bootstrap intervals; on the dotted line nothing cheaper is better. A marker that "
             "would cover another stands beside it, with a line to its place. First chart: bytes held; second chart: "
             "bytes read for one new token (methods that only save reads gain there).",
             budgets_differ(rows) ? " (the small number: rows kept or read per head)" : "",
             up ? "up: right answers from few bytes" : "down: close to full attention from few bytes");
    picture_begin(r, "pareto", "Quality against bytes", how);
    if (arrlen(rows)) {
        pareto_charts(r, rows);
        evaluated_note(r, rows);
    } else {
        not_evaluated_note(r);
    }
    picture_end(r);
}

// ---- 2: needles by depth and length
// One table a method and budget: columns are lengths of the text in tokens, rows are depths of the
// fact in per cent. A cell is the mean score of the n answers there; its viridis colour runs from dark
// (0) to bright (1).

static int on_grid(const Answer *x) { return x->depth >= 0 && x->length > 0; }

// The ascending values of one axis (stb array): depths, or lengths. Lengths vary by a few tokens
// with the item, so a length within an eighth of the first of its class counts as that one; so does
// a depth within 3 per cent.
static double *grid_axis(const Score *rows, int depth) {
    double *v = NULL;
    for (int i = 0; i < (int)arrlen(rows); i++)
        for (int j = 0; j < (int)arrlen(rows[i].answers); j++) {
            const Answer *x = &rows[i].answers[j];
            if (on_grid(x)) arrput(v, depth ? x->depth : x->length);
        }
    if (!v) return NULL;
    qsort(v, arrlen(v), sizeof *v, double_order);

    int n = 1;
    for (int i = 1; i < (int)arrlen(v); i++) {
        double first = v[n - 1];
        if (v[i] > first + (depth ? 3 : first / 8)) v[n++] = v[i];
    }
    arrsetlen(v, n);
    return v;
}

// The class of x on an axis: the last value that is not above x.
static int grid_at(const double *v, double x) {
    int i = (int)arrlen(v) - 1;
    while (i > 0 && v[i] > x) i--;
    return i;
}

// The rows of one table. sum, n (depths,lengths): the scores of a cell and their number.
static void needle_cells(Report *r, const Score *s, const double *len, const double *depth,
                         const double *sum, const double *n) {
    int lengths = (int)arrlen(len);
    for (int d = 0; d < (int)arrlen(depth); d++) {
        fprintf(r->f, "<tr><th>%g %%</th>", depth[d]);
        for (int l = 0; l < lengths; l++) {
            int at = d * lengths + l;
            if (!n[at]) {
                fprintf(r->f, "<td></td>");
                continue;
            }
            double x = sum[at] / n[at];
            int shade = (int)((SHADES - 1) * fmin(fmax(x, 0), 1) + .5);
            fprintf(r->f, "<td class=\"v%d %s\">%.2f <small>n=%g</small></td>",
                    shade, shade_text(shade), x, n[at]);
            csv_row(r, "needle", s->name, "length, depth, score", len[l], depth[d], x, s->budget, n[at]);
        }
        fprintf(r->f, "</tr>\n");
    }
}

// The table of one method and budget.
static void needle_table(Report *r, const Score *s, const double *len, const double *depth) {
    int lengths = (int)arrlen(len), depths = (int)arrlen(depth);
    double *sum = xcalloc((size_t)lengths * depths, sizeof *sum);
    double *n = xcalloc((size_t)lengths * depths, sizeof *n);
    for (int i = 0; i < (int)arrlen(s->answers); i++) {
        const Answer *x = &s->answers[i];
        if (!on_grid(x)) continue;
        int at = grid_at(depth, x->depth) * lengths + grid_at(len, x->length);
        sum[at] += x->score;
        n[at]++;
    }
    fprintf(r->f, "<table><caption>");
    marked_name(r->f, s->name);
    if (row_budget(s)) fprintf(r->f, ", budget %d", s->budget);
    fprintf(r->f, "</caption><tr><th>depth</th>");
    for (int l = 0; l < lengths; l++) fprintf(r->f, "<th>%g</th>", len[l]);
    fprintf(r->f, "</tr>\n");
    needle_cells(r, s, len, depth, sum, n);
    fprintf(r->f, "</table>\n");
    free(sum);
    free(n);
}

// 1: the row has an answer with a depth.
static int has_needles(const Score *s) {
    for (int j = 0; j < (int)arrlen(s->answers); j++)
        if (on_grid(&s->answers[j])) return 1;
    return 0;
}

// Every third colour with its score.
static void needle_legend(Report *r) {
    char text[48];
    legend_begin(r->f);
    for (int i = 0; i < SHADES; i += 3) {
        snprintf(text, sizeof text, i ? "%.1f" : "share of right answers %.1f", (double)i / (SHADES - 1));
        legend_shade(r->f, i, text);
    }
    legend_end(r->f);
}

static void draw_needle(Report *r, const Score *rows) {
    double *len = grid_axis(rows, 0), *depth = grid_axis(rows, 1);
    picture_begin(r, "needle", "Needles found, by depth and length",
                  "A fact was hidden in a long text and asked for. Columns: length of the text in "
                  "tokens; rows: how deep the fact stands (0 %: at the beginning). A cell has the "
                  "share of right answers, and of how many (n); bright is 1, dark is 0. A method "
                  "that forgets is dark where it forgets.");
    if (arrlen(depth)) {
        fprintf(r->f, "<div class=\"row\">\n");
        for (int i = 0; i < (int)arrlen(rows); i++)
            if (has_needles(&rows[i])) needle_table(r, &rows[i], len, depth);
        fprintf(r->f, "</div>\n");
        needle_legend(r);
    } else {
        picture_note(r, "No answers with a depth were measured: --eval needle makes them.");
    }
    picture_end(r);
    arrfree(len);
    arrfree(depth);
}

// ---- the demonstration: the built-in dialogue through every method

// Adds what the clocks gained between a and b to one phase of the run.
static void phase_note(DemoRun *d, int phase, const Clock *a, const Clock *b) {
    int decode = phase == PHASE_DECODE;
    double all = decode ? b->decode - a->decode : b->prefill - a->prefill;
    double part[PHASE_PARTS] = { b->attend - a->attend, b->select - a->select, b->commit - a->commit };
    part[IN_REST] = fmax(0, all - part[IN_ATTEND] - part[IN_SELECT] - part[IN_COMMIT]);
    for (int i = 0; i < PHASE_PARTS; i++) d->seconds[phase][i] += part[i];
    d->tokens[phase] += decode ? b->n_decode - a->n_decode : b->n_prefill - a->n_prefill;
}

// Lets the session speak a reply of its own, at most 32 tokens. *said becomes its text (stb array,
// NUL-terminated).
static void demo_say(App *a, char **said) {
    char *text = NULL;
    size_t n = 0;
    FILE *f = memory_stream(&text, &n);
    generate(a, 32, f);
    memory_stream_close(f);
    arrsetlen(*said, 0);
    memcpy(arraddnptr(*said, n + 1), text, n + 1);
    free(text);
}

// Where the answer to the last question first stands among n tokens: tokens [*from,*to); both are n
// if it is nowhere.
static void answer_at(const Report *r, const Token *t, int n, int *from, int *to) {
    char *text = token_bytes(r, NULL, t, n);
    arrput(text, 0);
    *from = n;
    *to = n;
    const char *hit = strstr(text, demo_answer);
    if (hit) {
        long begin = hit - text, end = begin + (long)strlen(demo_answer);
        long at = 0;                                    // bytes of the tokens up to and with i
        for (int i = 0; i < n && at < end; i++) {
            int len;
            if (t[i].id >= 0 && tokenizer_bytes(r->a->tok, t[i].id, &len)) at += len;
            if (at > begin && *from == n) *from = i;
            if (at >= end) *to = i + 1;
        }
    }
    arrfree(text);
}

// Notes what the last step read: for every token the share of all L*H query heads that have a row
// of it in their view.
static void demo_shares(const Session *s, DemoRun *d) {
    int L = s->c->L, H = s->c->H, R = H / s->c->G;
    int *rows = xmalloc((size_t)(s->n_tok + 1) * sizeof *rows);
    memcpy(arraddnptr(d->tok, s->n_tok), s->tok, (size_t)s->n_tok * sizeof *d->tok);
    memset(arraddnptr(d->share, s->n_tok), 0, (size_t)s->n_tok * sizeof *d->share);
    for (int l = 0; l < L; l++)
        for (int h = 0; h < H; h++) {
            const KVHead *head = kv_head(s, l, h / R);
            int n = view_rows(s, l, h, rows);
            for (int j = 0; j < n; j++) d->share[head->src[rows[j]]] += 1.f / (float)(L * H);
        }
    free(rows);
}

// Notes the bytes of a turn that has ended; `before` is the clock at the end of its prefill.
static void turn_bytes(const Session *s, DemoRun *d, int turn, const Clock *before) {
    const Clock *after = &s->clk;
    d->stored[turn] = (double)kv_bytes(s);
    d->read[turn] = 0;
    if (after->steps > before->steps) {
        double bytes = after->bytes_attended - before->bytes_attended;
        d->read[turn] = bytes / (double)(after->steps - before->steps);
    }
}

// Plays the dialogue through the session. The first run writes the script: full attention's
// replies. Later runs are fed the script's tokens. Of the last reply they are fed the first `given`
// tokens, or speak it themselves (given -1).
static void demo_play(Report *r, Session *s, DemoRun *d, int given) {
    App a = *r->a;
    int first = !arrlen(r->script);
    a.o = r->o;
    a.s = s;
    a.turn = NULL;
    a.closed = 0;
    a.logits = xcalloc(s->c->V, sizeof(float));
    for (int i = 0; i < DEMO_TURNS; i++) {
        char err[512] = "";
        Turn t = first ? render_turn(&a, demo_turns[i], err) : r->script[i];
        if (*err) die(EXIT_MODEL, "%s", err);
        if (first) session_take_back(&a, &t);
        int last = i == DEMO_TURNS - 1;
        int speaks = first || (last && given < 0);
        int n = last && given >= 0 ? given : (int)arrlen(t.dec);
        Clock start = s->clk;
        if (speaks) t.dec = NULL;
        arrput(a.turn, t);
        feed_prefill(&a, &t);
        Clock prefilled = s->clk;
        if (speaks) {
            demo_say(&a, &d->said);
        } else {
            for (int j = 0; j < n; j++) feed_decode(&a, t.dec[j]);
        }
        phase_note(d, PHASE_PREFILL, &start, &prefilled);
        phase_note(d, PHASE_DECODE, &prefilled, &s->clk);
        turn_bytes(s, d, i, &prefilled);
    }
    if (first) {
        r->script = a.turn;
    } else {
        if (given < 0) arrfree(arrlast(a.turn).dec);    // its own reply; everything else belongs to the script
        arrfree(a.turn);
    }
    free(a.logits);
}

// Plays the dialogue through a fresh session of one method. `why` is set when the method does not
// fit, or the dialogue not into its positions, which a line on stderr says.
static DemoRun demo_run(Report *r, const char *name) {
    DemoRun d = { 0 };
    snprintf(d.name, sizeof d.name, "%s", name);
    Session *s = session_try(r->a->c, r->a->w, r->o, name, d.why);
    if (!s) return d;
    if (arrlen(r->script) && record_fits(s, r->script, d.why)) {
        if (!quiet) warn("%s is left out of the demonstration: %s", name, d.why);
    } else {
        demo_play(r, s, &d, -1);
        demo_shares(s, &d);
    }
    session_close(s);
    return d;
}

// The runs of full attention and of the methods asked for (stb array).
static DemoRun *demo_runs(Report *r) {
    const Options *o = r->a->o;
    const char *list = demo_methods;
    if (*opt_str(o, "compare")) list = opt_str(o, "compare");
    else if (opt_given(o, "method")) list = opt_str(o, "method");

    DemoRun *d = NULL;
    char name[160];
    arrput(d, demo_run(r, "full"));
    for (int i = 0; list_word(list, i, name); i++) {
        if (!strcmp(name, "full")) continue;
        arrput(d, demo_run(r, name));
    }
    return d;
}

static void demo_free(DemoRun *d) {
    for (int i = 0; i < (int)arrlen(d); i++) {
        arrfree(d[i].said);
        arrfree(d[i].tok);
        arrfree(d[i].share);
    }
    arrfree(d);
}

// 1: the method's own answer to the last question holds the right number.
static int right_answer(const DemoRun *d) { return d->said && strstr(d->said, demo_answer); }

// ---- 3: memory over turns
// Two charts with a line a method: x is the turn, y (linear) the bytes of K and V held when the
// turn ends on the left, and the bytes a decode step of it reads on the right. A table gives the
// last turn's numbers, and each method's own answer.

// The table: a line for every method that was played.
static void memory_table(Report *r, const DemoRun *d) {
    const int last = DEMO_TURNS - 1;
    char held[32], read[32];
    fprintf(r->f, "<div class=\"wide\"><table><tr><th class=\"t\">method</th><th>held at the end</th>"
                  "<th>of full</th>"
                  "<th>read per step</th><th class=\"t\">its answer to the last "
                  "question</th></tr>\n");
    for (int i = 0; i < (int)arrlen(d); i++) {
        if (*d[i].why) continue;
        human_bytes(d[i].stored[last], held);
        human_bytes(d[i].read[last], read);
        fprintf(r->f, "<tr><td class=\"t\">");
        marked_name(r->f, d[i].name);
        fprintf(r->f, "</td><td>%s</td><td>%.0f %%</td><td>%s</td><td class=\"t\"><span class=\"%s</span> ",
                held, 100 * d[i].stored[last] / fmax(1, d[0].stored[last]), read,
                right_answer(&d[i]) ? "ok\">right:" : "bad\">wrong:");
        html_between(r->f, "", d[i].said ? d[i].said : "", "</td></tr>\n");
    }
    fprintf(r->f, "</table></div>\n");
}

// One series a method, its turns as points (stb array). read 0: bytes held; 1: bytes read.
static Series *memory_series(Report *r, const DemoRun *d, int read) {
    Series *s = NULL;
    for (int i = 0; i < (int)arrlen(d); i++) {
        if (*d[i].why) continue;
        Series one = { .name = d[i].name };
        for (int t = 0; t < DEMO_TURNS; t++) {
            Spot p = { .x = t + 1, .y = read ? d[i].read[t] : d[i].stored[t] };
            snprintf(p.what, sizeof p.what, "at turn %d", t + 1);
            arrput(one.spot, p);
            csv_row(r, "memory", d[i].name, read ? "turn, bytes read a step" : "turn, bytes held",
                    t + 1, 0, p.y, 0, 0);
        }
        arrput(s, one);
    }
    return s;
}

static void draw_memory(Report *r, const DemoRun *d) {
    Axes ax = { .x_name = "turn of the dialogue", .bytes_y = 1, .marks = MARKS_BETWEEN };
    picture_begin(r, "memory", "Memory over the turns of a dialogue",
                  "The built-in dialogue, turn by turn. First: bytes of keys and values held when a "
                  "turn ends; a line that stays flat is a method that really gives memory back. "
                  "Second: bytes read for each new token; methods that keep everything but read "
                  "little are low here only. Each line has its markers at places of its own, so that "
                  "lines on top of each other can be told apart.");
    fprintf(r->f, "<div class=\"charts\">\n");
    for (int read = 0; read < 2; read++) {
        Series *s = memory_series(r, d, read);
        ax.y_name = read ? "bytes read per decode step" : "bytes held at the end of the turn";
        chart(r->f, &ax, s, (int)arrlen(s), NULL);
        if (read) {
            fprintf(r->f, "</div>\n");
            legend_lines(r->f, s, (int)arrlen(s), 1);
        }
        series_free(s);
    }
    memory_table(r, d);
    for (int i = 0; i < (int)arrlen(d); i++)
        if (*d[i].why) picture_note(r, "%s was left out: %s", d[i].name, d[i].why);
    picture_end(r);
}

// ---- 4: head scores
// Four grids with a cell a query head: columns are heads, rows are layers. The first three show
// DiliLazyKV's scores of --calibrate, the last one the rows a head may read; the brightest viridis
// colour is the grid's largest value.

typedef struct {
    int cell, tall;             // pixels of a cell: width, height
    int named;                  // 1: cells have room for their number
} HeadGrid;
enum { GRID_LEFT = 40, GRID_TOP = 20 };                 // where the first cell stands
enum { BARS_LEFT = 150 };                               // where the bars of pictures 5 and 9 begin

// The sizes of a grid of H heads: the more heads, the smaller the cells.
static HeadGrid head_grid_size(int H) {
    HeadGrid g = { .cell = 6, .tall = 6, .named = 0 };
    if (H <= 12) {
        g.cell = 44;
        g.tall = 24;
        g.named = 1;
    } else if (H <= 32) {
        g.cell = 16;
        g.tall = 16;
    }
    return g;
}

// The numbers of heads above and of layers beside the grid; every one, or every eighth head and
// fourth layer.
static void head_grid_labels(FILE *f, const HeadGrid *g, int L, int H) {
    for (int h = 0; h < H; h += g->named ? 1 : 8) {
        int px = GRID_LEFT + h * g->cell + g->cell / 2;
        fprintf(f, "<text x=\"%d\" y=\"14\" text-anchor=\"middle\">%d</text>", px, h);
    }
    for (int l = 0; l < L; l += g->named ? 1 : 4) {
        int py = GRID_TOP + l * g->tall + g->tall / 2 + 4;
        fprintf(f, "<text x=\"34\" y=\"%d\" text-anchor=\"end\">%d</text>", py, l);
    }
}

// Draws one grid. x (L,H); whole 1: numbers without decimals.
static void head_grid(Report *r, const char *name, const double *x, int whole) {
    int L = r->a->c->L, H = r->a->c->H;
    HeadGrid g = head_grid_size(H);
    double top = 0;
    for (int i = 0; i < L * H; i++) top = fmax(top, x[i]);

    panel_begin(r->f, name);
    svg_begin(r->f, "heads", max_int(44 + H * g.cell, 330), 36 + L * g.tall);
    head_grid_labels(r->f, &g, L, H);
    for (int i = 0; i < L * H; i++) {
        int l = i / H, h = i % H;
        int shade = top > 0 ? (int)(x[i] / top * (SHADES - 1) + .5) : 0;
        int px = GRID_LEFT + h * g.cell, py = GRID_TOP + l * g.tall;
        fprintf(r->f, "<rect class=\"v%d\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\">",
                shade, px, py, g.cell - 1, g.tall - 1);
        fprintf(r->f, "<title>layer %d, head %d: %.4g</title></rect>", l, h, x[i]);
        if (g.named)
            fprintf(r->f, "<text class=\"%s\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">%.*f</text>",
                    shade_text(shade), px + g.cell / 2, py + g.tall / 2 + 4,
                    whole ? 0 : 3, x[i]);
        csv_row(r, "heads", name, "layer, head", l, h, x[i], 0, 0);
    }
    fprintf(r->f, "\n<text class=\"dim\" x=\"40\" y=\"%d\">head; rows: layer; brightest = %.4g</text>",
            32 + L * g.tall, top);
    fprintf(r->f, "</svg></div>\n");
}

// The file of head scores: --dililazy-scores, or the one in the model's folder.
static void scores_path(const Report *r, char path[1100]) {
    const char *given = opt_str(r->o, "dililazy-scores");
    if (*given) snprintf(path, 1100, "%s", given);
    else snprintf(path, 1100, "%s/head_scores.json", r->a->c->dir);
}

// The fourth grid: the rows that DiliLazyKV lets each head read beside the recent ones. inf (L,H).
static void head_budgets(Report *r, const double *inf) {
    int L = r->a->c->L, H = r->a->c->H;
    int budget = opt_int(r->o, "budget") ? opt_int(r->o, "budget") : 128;
    int window = opt_given(r->o, "obs-window") ? opt_int(r->o, "obs-window") : 16;
    int base = budget > window ? budget - window : budget;
    double beta = opt_real(r->o, "dililazy-beta"), eps = opt_real(r->o, "dililazy-eps");
    int *cap = xmalloc((size_t)L * H * sizeof *cap);
    double *rows = xmalloc((size_t)L * H * sizeof *rows);
    dililazy_caps(inf, L, H, base, beta, eps, ALLOC_PAPER, cap);
    for (int i = 0; i < L * H; i++) rows[i] = cap[i];
    head_grid(r, "Rows each head may read beside the recent ones", rows, 1);
    fprintf(r->f, "</div>\n");
    picture_note(r, "%d rows a head on average, before the last %d that every head keeps; beta %g.",
                 base, window, beta);
    free(cap);
    free(rows);
}

static void draw_heads(Report *r) {
    static const char *kind[] = { "dili", "lazy", "inf" };
    static const char *title[] = {
        "Dili: of what the head looks at most, the needle's share",
        "Lazy: of its looks at the needle, those among its strongest",
        "Inf: both together (harmonic mean)",
    };
    char path[1100], err[512];
    double *x[3];
    picture_begin(r, "heads", "Which heads find facts, and the budget that earns them (DiliLazyKV)",
                  "Each cell is one attention head: how strongly it looked at a fact hidden in a "
                  "long text, measured once per model with --calibrate. Bright heads find facts; "
                  "DiliLazyKV gives them more rows (last map) and takes them from the dark ones.");
    scores_path(r, path);
    for (int i = 0; i < 3; i++) x[i] = scores_load(path, kind[i], r->a->c->L, r->a->c->H, err);
    if (x[2]) {
        fprintf(r->f, "<div class=\"charts\">\n");
        for (int i = 0; i < 3; i++)
            if (x[i]) head_grid(r, title[i], x[i], 0);
        head_budgets(r, x[2]);
    } else {
        picture_note(r, "No head scores: %s", err);
    }
    for (int i = 0; i < 3; i++) free(x[i]);
    picture_end(r);
}

// ---- 5: PATS
// Two charts with a step line a schedule: x is a token's position t, y the low bits b(t,T) cut from
// each element of its rows, 0 to 10. Below, one key row as a grid of its bits (columns: elements;
// sign on top), and bars of a row's bytes.

// The schedule's b(t,T) of every token in a first prefill of T tokens, as a step line.
static Series pats_line(Report *r, const char *name, int colour, const Pats *x, int T) {
    Series s = { name, colour, NULL };
    int b = -1;                                         // of the step so far
    for (int t = 0; t <= T; t++) {
        int next = t < T ? pats_bits(x, t, T) : b;
        if (next == b && t < T) continue;
        Spot end = { .x = t, .y = b }, begin = { .x = t, .y = next };
        if (b >= 0) arrput(s.spot, end);
        if (t < T) arrput(s.spot, begin);
        b = next;
        csv_row(r, "pats", name, "tokens, position, bits cut", T, t, b, 0, 0);
    }
    return s;
}

// One chart of such lines; frees them.
static void pats_chart(Report *r, Series *s, const char *title) {
    Axes ax = { .x_name = "position t of the token (0: oldest)", .y_top = 11 };
    ax.y_name = "b(t,T): low bits cut from each element";
    panel_begin(r->f, title);
    fprintf(r->f, "\n");
    chart(r->f, &ax, s, (int)arrlen(s), NULL);
    legend_lines(r->f, s, (int)arrlen(s), 0);
    fprintf(r->f, "</div>\n");
    series_free(s);
}

// The chosen schedule at three lengths, and the three schedules at one length.
static void pats_schedules(Report *r, const Pats *x) {
    static const char *kind[] = { "middle", "old", "new" };
    static const char *name[] = { "T = 256 tokens", "T = 512", "T = 1,024" };
    static const int T[] = { 256, 512, 1024 };
    Series *s = NULL;
    fprintf(r->f, "<div class=\"charts\">\n");
    for (int i = 0; i < 3; i++) arrput(s, pats_line(r, name[i], i + 1, x, T[i]));
    pats_chart(r, s, "The chosen schedule as the dialogue grows");

    s = NULL;
    for (int i = 0; i < 3; i++) {
        Pats y = *x;
        y.schedule = i;
        y.is_static = 0;
        arrput(s, pats_line(r, kind[i], i + 1, &y, 1024));
    }
    pats_chart(r, s, "The three schedules at 1,024 tokens");
    fprintf(r->f, "</div>\n");
}

// The bits of one element, from the sign down. Neighbouring bits of one kind and one value are one
// rectangle.
static void pats_element_bits(FILE *f, uint16_t element, int b, int px, int cell, int tall) {
    int from[] = { 0, 1, 6, 16 - b, 16 };               // sign, exponent, mantissa kept, mantissa cut, end
    for (int kind = 0; kind < 4; kind++) {
        int i = from[kind];
        while (i < from[kind + 1]) {
            int on = element >> (15 - i) & 1;
            int n = 1;
            while (i + n < from[kind + 1] && (element >> (15 - i - n) & 1) == on) n++;
            fprintf(f, "<rect class=\"b%d%s\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/>",
                    kind, on ? "" : " off", px, i * tall, cell - 1, n * tall - 1);
            i += n;
        }
    }
}

// One key row h (D) in f16, of which b low bits are cut.
static void pats_row_bits(Report *r, const uint16_t *h, int D, int b) {
    int cell = max_int(340 / D, 3), tall = 9;
    svg_begin(r->f, "bits", max_int(80 + D * cell, CHART_W), 16 * tall + 18);
    fprintf(r->f, "<text x=\"70\" y=\"9\" text-anchor=\"end\">sign</text>");
    fprintf(r->f, "<text x=\"70\" y=\"%d\" text-anchor=\"end\">exponent</text>", 4 * tall);
    fprintf(r->f, "<text x=\"70\" y=\"%d\" text-anchor=\"end\">mantissa</text>\n", 10 * tall);
    for (int d = 0; d < D; d++) pats_element_bits(r->f, h[d], b, 76 + d * cell, cell, tall);
    fprintf(r->f, "\n<text class=\"dim\" x=\"76\" y=\"%d\">elements 0 to %d of one key row; %d bits cut</text>",
            16 * tall + 14, D - 1, b);
    fprintf(r->f, "</svg>\n");
    legend_begin(r->f);
    legend_box(r->f, "b0", "sign");
    legend_box(r->f, "b1", "exponent");
    legend_box(r->f, "b2", "mantissa, kept");
    legend_box(r->f, "b3", "mantissa, cut: not stored");
    fprintf(r->f, "<li>full colour: bit 1, pale: bit 0</li>\n");
    legend_end(r->f);
}

// One bar at height y: the bytes of a row of D elements with b bits cut, packed densely (rows64 0:
// this program's way) or in 64-byte blocks of its own (rows64 1: the paper's way). A dashed box is
// padding. scale: units a byte.
static void pats_bar(Report *r, int rows64, int D, int b, int y, double scale) {
    int bytes = (int)pats_row_bytes(rows64, D, 16 - b), used = D * (16 - b) / 8;
    if (!rows64) fprintf(r->f, "<text x=\"4\" y=\"%d\">%d bits cut</text>", y + 11, b);
    fprintf(r->f, "<text x=\"142\" y=\"%d\" text-anchor=\"end\">%s</text>",
            y + 11, rows64 ? "blocks" : "dense");
    fprintf(r->f, "<rect class=\"b2\" x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"13\"/>",
            BARS_LEFT, y, used * scale);
    if (bytes > used)
        fprintf(r->f, "<rect class=\"b4\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"13\"/>",
                BARS_LEFT + used * scale, y, (bytes - used) * scale);
    fprintf(r->f, "<text x=\"%d\" y=\"%d\">%d bytes</text>\n", CHART_W - 74, y + 11, bytes);
    csv_row(r, "pats", rows64 ? "64-byte blocks" : "dense", "bits cut, elements, bytes of a row",
            b, D, bytes, 0, 0);
}

// How many bytes a row takes as 0, 2, .. 10 bits are cut, with grid lines every 64 bytes, of which at
// most four have their number.
static void pats_row_blocks(Report *r, int D) {
    int wide = (int)pats_row_bytes(1, D, 16), every = 64 * max_int((wide + 255) / 256, 1), y = 0;
    double scale = (double)(CHART_W - BARS_LEFT - 80) / wide;
    svg_begin(r->f, "bytes", CHART_W, 250);
    for (int x = 0; x <= wide; x += 64) {
        double px = BARS_LEFT + x * scale;
        fprintf(r->f, "<path class=\"grid\" d=\"M%.1f 0V206\"/>", px);
        if (x % every) continue;
        fprintf(r->f, "<text class=\"dim\" x=\"%.1f\" y=\"222\" text-anchor=\"middle\">%d</text>", px, x);
    }
    for (int b = 0; b <= 10; b += 2)
        for (int rows64 = 0; rows64 < 2; rows64++) {
            pats_bar(r, rows64, D, b, y, scale);
            y += 17;
        }
    fprintf(r->f, "<text class=\"dim\" x=\"%d\" y=\"242\">bytes of one row; lines every 64</text></svg>\n",
            BARS_LEFT);
    legend_begin(r->f);
    legend_box(r->f, "b2", "bits of the row");
    legend_box(r->f, "b4", "padding of the last block: nothing saved");
    fprintf(r->f, "<li>dense: as this program packs them; blocks: as the paper does, 64 bytes each</li>\n");
    legend_end(r->f);
}

// One key row of this model, from the middle of the first turn and of the layers, cut as token 128
// of 256 is.
static void pats_example(Report *r, const Pats *x) {
    int D = r->a->c->D, l = r->a->c->L / 2;
    int n = (int)arrlen(r->script[0].pre), at = n / 2;
    float *row = xmalloc((size_t)D * sizeof *row);
    uint16_t *h = xmalloc((size_t)D * sizeof *h);
    Session *full = session_open(r->a->c, r->a->w, r->host, "full");
    prefill(full, r->script[0].pre, n);
    kv_load_k(full, kv_head(full, l, 0), NULL, at, 1, row);
    from_f32(h, row, DT_F16, (size_t)D);
    fprintf(r->f, "<div><h3>One key row: token %d, layer %d, KV head 0</h3>\n", at, l);
    pats_row_bits(r, h, D, pats_bits(x, 128, 256));
    fprintf(r->f, "</div>\n");
    session_close(full);
    free(row);
    free(h);
}

static void draw_pats(Report *r) {
    char err[512];
    Session *s = session_try(r->a->c, r->a->w, r->host, "pats", err);
    picture_begin(r, "pats", "Fewer bits for some tokens (PATS)",
                  "PATS keeps every token but cuts low mantissa bits of 16-bit numbers, by the "
                  "token's place in the dialogue: the curves say how many. Below: one key row of "
                  "this model with its bits, and how many bytes such a row takes.");
    if (s) {
        const Pats *x = s->part[0].ms;
        pats_schedules(r, x);
        fprintf(r->f, "<div class=\"charts\">\n");
        pats_example(r, x);
        panel_begin(r->f, "Bytes of a row");
        pats_row_blocks(r, r->a->c->D);
        fprintf(r->f, "</div>\n</div>\n");
        picture_note(r, "Schedule %s, %d to %d bits; the first %d tokens lose %d bits only, the last %d none.",
                     opt_str(r->o, "pats-schedule"), x->b_min, x->b_max, x->sink, x->b_min, x->window);
    } else {
        picture_note(r, "PATS does not fit this model or these options: %s", err);
    }
    session_close(s);
    picture_end(r);
}

// ---- 6: the tree of LycheeCluster
// An outline to open and close: coarse units, their clusters, their chunks with the text. A branch
// is bold where the step read it and grey where it did not; the square's viridis colour is the
// score by which the step chose, best first, and the answer is underlined.

typedef struct { float *q; } QueryProbe;                // (L,H,D): the queries of the last decode step

// A method's select hook that only notes the queries. q (H,D).
static void query_probe_select(Session *s, void *ms, int l, const float *q) {
    QueryProbe *probe = ms;
    size_t n = (size_t)s->c->H * s->c->D;
    memcpy(probe->q + (size_t)l * n, q, n * sizeof *q);
}

// Rides on lychee as a second part; it is not in the table of methods.
static const Method query_probe = {
    .name = "probe",
    .state = sizeof(QueryProbe),
    .select = query_probe_select,
};

typedef struct {                // what the tree is drawn from: one list of one layer
    const Session *s;
    const Lychee *x;
    const Tree *t;
    int l, h;                   // the layer, and a query head that reads by the list
    const float *q;             // (R,D) the queries it is sought with
    unsigned char *read;        // (n_tok) 1: a row that the step read
    unsigned char *opened;      // (units) 1: the step looked into the unit
    float lo, hi;               // the least and the largest score of its nodes
    float *mu;                  // (D) room for a centre
} TreeView;

// How well the node's centre matches: the largest q.mu / |q| of the queries.
static float node_match(TreeView *v, const Nodes *u, int node) {
    int D = v->s->c->D;
    float best = -INFINITY;
    to_f32(v->mu, u->mu + (size_t)node * D, DT_BF16, (size_t)D);
    for (int i = 0; i < v->s->c->H / v->s->c->G; i++) {
        const float *q = v->q + (size_t)i * D;
        best = fmaxf(best, dot_f32(q, v->mu, D) / fmaxf(sqrtf(dot_f32(q, q, D)), 1e-20f));
    }
    return best;
}

// What a node's score adds to its match, as section 11 does: beta |q| r.
static float node_slack(const TreeView *v, const Nodes *u, int node) {
    return v->x->beta * u->r[node];
}

// The score by which a step chooses among the nodes of a level.
static float node_score(TreeView *v, const Nodes *u, int node) {
    return node_match(v, u, node) + node_slack(v, u, node);
}

// How many chunks of cluster c the step read, and how many it has.
static int cluster_read(const TreeView *v, int c) {
    int n = 0;
    for (int j = 0; j < v->x->M; j++) n += v->t->fine.of[j] == c && v->read[v->x->start[j]];
    return n;
}

static int cluster_chunks(const TreeView *v, int c) {
    int n = 0;
    for (int j = 0; j < v->x->M; j++) n += v->t->fine.of[j] == c;
    return n;
}

// How many chunks are below the node.
static int node_chunks(const TreeView *v, const Nodes *u, int node) {
    int n = 0;
    if (u == &v->t->fine) return cluster_chunks(v, node);
    for (int c = 0; c < v->t->fine.n; c++) n += u->of[c] == node ? cluster_chunks(v, c) : 0;
    return n;
}

// 1: chunk j holds the answer.
static int chunk_answers(const Report *r, const TreeView *v, int j) {
    const int *start = v->x->start;
    int from, to;
    answer_at(r, v->s->tok + start[j], start[j + 1] - start[j], &from, &to);
    return from < to;
}

// 1: a chunk of cluster c holds the answer.
static int cluster_answers(const Report *r, const TreeView *v, int c) {
    for (int j = 0; j < v->x->M; j++)
        if (v->t->fine.of[j] == c && chunk_answers(r, v, j)) return 1;
    return 0;
}

// Opens a node's branch: its line with the numbers. Branches that were read, or hold the answer,
// start open.
static void node_begin(Report *r, TreeView *v, const Nodes *u, int node, const char *what, int n_read,
                       int answers) {
    float match = node_match(v, u, node), slack = node_slack(v, u, node);
    float score = match + slack;
    int shade = v->hi > v->lo ? (int)((score - v->lo) / (v->hi - v->lo) * (SHADES - 1) + .5f) : 0;
    int chunks = node_chunks(v, u, node);
    fprintf(r->f, "<details%s><summary class=\"%s\"><i class=\"v%d\"></i>",
            n_read || answers ? " open=\"open\"" : "", n_read ? "read" : "skip", shade);
    fprintf(r->f, "%s %d: score %.2f", what, node, score);
    if (slack > 0) fprintf(r->f, " = match %.2f + %.2f for the radius", match, slack);
    fprintf(r->f, "; %d of %d chunk%s read", n_read, chunks, chunks == 1 ? "" : "s");
    if (u == &v->t->coarse && !v->opened[node]) fprintf(r->f, ", not opened");
    fprintf(r->f, "%s</summary>\n", answers ? " <b class=\"gold\">the answer is in here</b>" : "");
    csv_row(r, "lychee", what, "node, chunks read, upper bound, radius, match",
            node, n_read, match + u->r[node], u->r[node], match);
}

static void node_end(Report *r) { fprintf(r->f, "</details>\n"); }

// One cluster with the texts of its chunks.
static void tree_cluster(Report *r, TreeView *v, int c) {
    const int *start = v->x->start;
    node_begin(r, v, &v->t->fine, c, "cluster", cluster_read(v, c), cluster_answers(r, v, c));
    for (int j = 0; j < v->x->M; j++) {
        int read = v->read[start[j]];
        if (v->t->fine.of[j] != c) continue;
        fprintf(r->f, "<p class=\"%s\">%s, tokens %d to %d: <span%s>",
                read ? "read" : "skip", read ? "read" : "skipped", start[j], start[j + 1] - 1,
                chunk_answers(r, v, j) ? " class=\"gold\"" : "");
        tokens_text(r, v->s->tok + start[j], start[j + 1] - start[j]);
        fprintf(r->f, "</span></p>\n");
    }
    node_end(r);
}

// The nodes of a level that have chunks, best score first (stb array): those whose of[] is `above`, or
// all of them (of NULL). There are few, so an insertion sort does; equal scores keep their order.
static int *by_score(TreeView *v, const Nodes *u, const int *of, int above) {
    int *order = NULL;
    for (int node = 0; node < u->n; node++)
        if (u->tokens[node] && (!of || of[node] == above)) arrput(order, node);
    for (int i = 1; i < (int)arrlen(order); i++)
        for (int j = i; j > 0 && node_score(v, u, order[j]) > node_score(v, u, order[j - 1]); j--) {
            int x = order[j];
            order[j] = order[j - 1];
            order[j - 1] = x;
        }
    return order;
}

// The clusters of a list, as in by_score.
static void tree_clusters(Report *r, TreeView *v, const int *of, int above) {
    int *order = by_score(v, &v->t->fine, of, above);
    for (int i = 0; i < (int)arrlen(order); i++) tree_cluster(r, v, order[i]);
    arrfree(order);
}

// One coarse unit with its clusters.
static void tree_unit(Report *r, TreeView *v, int unit) {
    const Nodes *top = &v->t->coarse;
    int n_read = 0, answers = 0;
    for (int c = 0; c < v->t->fine.n; c++) {
        if (top->of[c] != unit) continue;
        n_read += cluster_read(v, c);
        answers |= cluster_answers(r, v, c);
    }
    node_begin(r, v, top, unit, "unit", n_read, answers);
    tree_clusters(r, v, top->of, unit);
    node_end(r);
}

// The whole tree; without a coarse level its clusters only.
static void tree_draw(Report *r, TreeView *v) {
    fprintf(r->f, "<div class=\"tree\">\n");
    if (v->t->coarse.n) {
        int *order = by_score(v, &v->t->coarse, NULL, 0);
        for (int i = 0; i < (int)arrlen(order); i++) tree_unit(r, v, order[i]);
        arrfree(order);
    } else {
        tree_clusters(r, v, NULL, 0);
    }
    fprintf(r->f, "</div>\n");
}

// Every third colour with its score.
static void tree_legend(Report *r, const TreeView *v) {
    char text[32];
    legend_begin(r->f);
    for (int i = 0; i < SHADES; i += 3) {
        float score = v->lo + (v->hi - v->lo) * i / (SHADES - 1);
        snprintf(text, sizeof text, "%s%.2f", i ? "" : "score ", score);
        legend_shade(r->f, i, text);
    }
    legend_end(r->f);
}

// The range of all scores, for the colours.
static void tree_range(TreeView *v) {
    const Nodes *level[] = { &v->t->fine, &v->t->coarse };
    v->lo = INFINITY;
    v->hi = -INFINITY;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < level[k]->n; i++) {
            if (!level[k]->tokens[i]) continue;
            float score = node_score(v, level[k], i);
            v->lo = fminf(v->lo, score);
            v->hi = fmaxf(v->hi, score);
        }
}

// Marks the units that the step looked into, as open_units does: the best k_g, and more until they
// hold four times what the budget has room for.
static void tree_opened(TreeView *v) {
    const Nodes *top = &v->t->coarse;
    int *order = by_score(v, top, NULL, 0);
    int enough = 4 * room_for_chunks(v->x), tokens = 0;
    for (int i = 0; i < (int)arrlen(order); i++) {
        if (i >= v->x->kg && tokens >= enough) break;
        v->opened[order[i]] = 1;
        tokens += top->tokens[order[i]];
    }
    arrfree(order);
}

// The query head to look at, as l*H + h: of the layers from `first` on the one with the best score,
// or the last layer's first head when there are no scores.
static int fact_head(const Report *r, int first) {
    const Config *c = r->a->c;
    char path[1100], err[512];
    scores_path(r, path);
    double *inf = scores_load(path, "inf", c->L, c->H, err);
    int best = (c->L - 1) * c->H;
    if (inf)
        for (int i = first * c->H; i < c->L * c->H; i++)
            if (inf[i] > inf[best]) best = i;
    free(inf);
    return best;
}

// The tree of layer l by which query head h reads, and which rows its last step read. q (L,H,D): the
// queries of that step. The head's list is sought as section 11 does: with all queries of the KV
// head's group.
static TreeView tree_view_open(const Session *s, const float *q, int l, int h) {
    int H = s->c->H, G = s->c->G, D = s->c->D, R = H / G, g = h / R;
    const Lychee *x = s->part[0].ms;
    TreeView v = { .s = s, .x = x, .t = &x->tree[l * G + g], .l = l, .h = h };
    v.q = q + ((size_t)l * H + g * R) * D;
    v.read = xcalloc((size_t)s->n_tok + 1, 1);
    v.opened = xcalloc((size_t)v.t->coarse.n + 1, 1);
    v.mu = xmalloc((size_t)D * sizeof(float));
    int *rows = xmalloc((size_t)(s->n_tok + 1) * sizeof *rows);
    int n = view_rows(s, l, h, rows);
    for (int i = 0; i < n; i++) v.read[rows[i]] = 1;
    free(rows);
    tree_opened(&v);
    tree_range(&v);
    return v;
}

static void tree_view_close(TreeView *v) {
    free(v->read);
    free(v->opened);
    free(v->mu);
}

// The sentence above the tree: the question, the reply so far, and how much is read to go on.
static void tree_question(Report *r, const TreeView *v) {
    const Session *s = v->s;
    int used = 0;
    for (int j = 0; j < v->x->M; j++) used += v->read[v->x->start[j]];
    html_between(r->f, "<p>The user asks <b>", demo_turns[DEMO_TURNS - 1], "</b>");
    fprintf(r->f, " and the reply has reached <b>");
    tokens_text(r, s->tok + s->n_tok - s->step, s->step);
    fprintf(r->f, "</b>\xe2\x80\xa6 Query head %d of layer %d, which of the layers with an index finds facts "
                  "best, reads %d of %d chunks to go on.</p>\n", v->h, v->l, used, v->x->M);
}

// The chunk of the tree that holds the answer; -1: none does.
static int answer_chunk(const Report *r, const TreeView *v) {
    int j = v->x->M_built ? v->x->M - 1 : -1;
    while (j >= 0 && !chunk_answers(r, v, j)) j--;
    return j;
}

// The place of a node in an order, from 1.
static int rank_in(const int *order, int node) {
    int i = 0;
    while (order[i] != node) i++;
    return i + 1;
}

// Why the step read chunk j, or did not: its cluster's unit was not opened, or better clusters fill
// the budget, or the list ends before it because a chunk did not fit.
static void tree_reason(Report *r, TreeView *v, int j) {
    const Tree *t = v->t;
    int c = v->t->fine.of[j], room = room_for_chunks(v->x), better = 0, tokens = 0;
    int *order = by_score(v, &t->fine, NULL, 0), *units = NULL;
    int unit = t->coarse.n ? t->coarse.of[c] : -1;
    char what[256];
    for (int i = 0; order[i] != c; i++) {
        if (unit >= 0 && !v->opened[t->coarse.of[order[i]]]) continue;
        better++;
        tokens += t->fine.tokens[order[i]];
    }
    snprintf(what, sizeof what, "cluster %d, with the chunk that holds the answer, has a score of %.2f", c,
             node_score(v, &t->fine, c));
    if (v->read[v->x->start[j]]) {
        picture_note(r, "Why this head reads the answer: %s; %d of those looked at score better, and the "
                        "budget has room for it.", what, better);
    } else if (unit >= 0 && !v->opened[unit]) {
        units = by_score(v, &t->coarse, NULL, 0);
        picture_note(r, "Why this head skips the answer: unit %d, which holds it, has a score of %.2f, place %d "
                        "of %d, and was not opened: better units hold enough.",
                     unit, node_score(v, &t->coarse, unit), rank_in(units, unit), (int)arrlen(units));
    } else if (tokens >= room) {
        picture_note(r, "Why this head skips the answer: %s; %d clusters score better and hold %d tokens, "
                        "and the budget has room for %d.", what, better, tokens, room);
    } else {
        picture_note(r, "Why this head skips the answer: %s; %d clusters score better and hold %d of the %d "
                        "tokens that the budget has room for, and the list ends at the first chunk that does "
                        "not fit.",
                     what, better, tokens, room);
    }
    arrfree(units);
    arrfree(order);
}

// How many query heads of the layers with an index read row `row`, and which layers have none.
static void tree_others(Report *r, const TreeView *v, int row) {
    const Session *s = v->s;
    int L = s->c->L, H = s->c->H, indexed = 0, readers = 0;
    int *rows = xmalloc((size_t)(s->n_tok + 1) * sizeof *rows);
    char whole[512] = "";
    for (int l = 0; l < L; l++) {
        size_t n = strlen(whole);
        if (!indexed_layer(s, v->x, l)) {
            snprintf(whole + n, sizeof whole - n, "%s%d", n ? ", " : "", l);
            continue;
        }
        for (int h = 0; h < H; h++) {
            int k = view_rows(s, l, h, rows);
            indexed++;
            while (k > 0 && rows[k - 1] != row) k--;
            readers += k > 0;
        }
    }
    free(rows);
    picture_note(r, "Of the %d query heads with an index, %d read the answer in this step. Layers that read "
                    "every row: %s (--lychee-full-layers %d).",
                 indexed, readers, *whole ? whole : "none", v->x->full_layers);
}

// Draws the tree of the head that finds facts best. q (L,H,D): the queries of the last step.
static void lychee_picture(Report *r, Session *s, const float *q) {
    const Lychee *x = s->part[0].ms;
    int H = s->c->H, at = fact_head(r, x->full_layers), l = at / H;
    if (!x->M_built || !indexed_layer(s, x, l)) {
        picture_note(r, "No index was built: the dialogue fits into the budget, or --lychee-full-layers covers "
                        "every layer.");
        return;
    }
    TreeView v = tree_view_open(s, q, l, at % H);
    int answer = answer_chunk(r, &v);
    tree_question(r, &v);
    if (answer >= 0) {
        tree_reason(r, &v, answer);
        tree_others(r, &v, x->start[answer]);
    } else {
        picture_note(r, "The answer is in no chunk of the tree: it stands in a row that is always read, or "
                        "nowhere.");
    }
    tree_draw(r, &v);
    tree_legend(r, &v);
    picture_note(r, "The score decides: match + %g radius (--lychee-beta). Match: q.mu / |q| of the query head of the "
                    "group where it is best (1: the same direction), mu the node's centre; radius: how far the "
                    "key of a chunk below lies from mu at most. The first %d tokens and the last %d are outside "
                    "the tree and always read. The chunk with the answer is underlined.",
                 x->beta, x->sink, s->n_tok - t_idx(x));
    tree_view_close(&v);
}

// How many tokens of full attention's last reply stand before the answer; all of them if the answer
// is not in it.
static int tokens_before_answer(const Report *r) {
    const int *id = r->script[DEMO_TURNS - 1].dec;
    Token *t = NULL;
    int from, to;
    for (int i = 0; i < (int)arrlen(id); i++) {
        Token one = { .id = id[i] };
        arrput(t, one);
    }
    answer_at(r, t, (int)arrlen(t), &from, &to);
    arrfree(t);
    return from;
}

static void draw_lychee(Report *r) {
    char err[512];
    Session *s = session_try(r->a->c, r->a->w, r->host, "lychee", err);
    picture_begin(r, "lychee", "The tree a question walks down (LycheeCluster)",
                  "The text is cut into chunks, alike chunks form clusters, alike clusters form "
                  "units. For each new token only the chunks of the best matching clusters are "
                  "read: bold branches were read, grey ones skipped. The square's colour is the "
                  "score that decides (brighter: better); siblings stand in its order. Click to open "
                  "a branch.");
    if (s) {
        DemoRun d = { 0 };
        QueryProbe *probe = observe(s, &query_probe);
        float *q = xcalloc((size_t)s->c->L * s->c->H * s->c->D, sizeof(float));
        probe->q = q;
        demo_play(r, s, &d, tokens_before_answer(r));
        lychee_picture(r, s, q);
        session_close(s);
        free(q);
    } else {
        picture_note(r, "LycheeCluster does not fit these options: %s", err);
    }
    picture_end(r);
}

// ---- 7: attention maps with LoopServe's lines
// A square a head: the row is the token that reads, the column the token that is read, oldest top
// left, with the number and text of every n-th token at its sides. A pixel's viridis colour is the
// probability, logarithmic from 1e-4 (dark) to 1; white shapes over it are the lines that LoopServe
// computes. The whole dialogue is prefilled as one turn, and
// the maps are written layer by layer while it runs.

typedef struct {
    Report *r;
    LoopServe *x;               // LoopServe's options
} MapProbe;

// The colour of a probability: 0 at 1e-4 and below, the last one at 1.
static int map_shade(float p) {
    float v = p > 1e-4f ? (log10f(p) + 4) / 4 * (SHADES - 1) + .5f : 0;
    return v > SHADES - 1 ? SHADES - 1 : (int)v;
}

// Every how many layers, or heads, of n a map is drawn: all of a small model, some from all over a
// large one.
static int map_step(int n) {
    int most = 1;
    while (most * most < MAP_MOST) most++;
    return (n + most - 1) / most;
}

// Fills pixel (side,side) with the colours of head h's whole attention (T,T). Where several cells
// fall on one pixel it shows the largest. q (T,H,D).
static void map_pixels(Session *s, int l, int h, const float *q, int T, int side, Tile *tile,
                       unsigned char *pixel) {
    float *P = scratch(s, (size_t)LINE_BLOCK * T * sizeof(float));
    int R[LINE_BLOCK];
    memset(pixel, 0, (size_t)side * side);
    for (int r0 = 0; r0 < T; r0 += LINE_BLOCK) {
        int m = min_int(T - r0, LINE_BLOCK);
        for (int i = 0; i < m; i++) R[i] = r0 + i;
        line_probs(s, l, h, q, T, R, m, P, tile);
        for (int i = 0; i < m; i++) {
            unsigned char *row = pixel + (size_t)((int64_t)(r0 + i) * side / T) * side;
            for (int c = 0; c <= r0 + i; c++) {
                unsigned char *to = &row[(int64_t)c * side / T];
                int v = map_shade(P[(size_t)i * T + c]);
                if (v > *to) *to = (unsigned char)v;
            }
        }
    }
}

typedef struct { int lo, hi; } LineRange;               // the numbers lo..hi-1

// run: the maximal runs of set bits of b (n bits), ascending. Returns their number.
static int bit_runs(const uint64_t *b, int n, LineRange *run) {
    int count = 0, i = 0;
    while (i < n) {
        if (!b[i >> 6]) {                               // no bit up to the end of this word
            i = (i | 63) + 1;
            continue;
        }
        int end = i;
        while (end < n && b[end >> 6] >> (end & 63) & 1) end++;
        if (end > i) run[count++] = (LineRange){ i, end };
        i = end + 1;
    }
    return count;
}

// Draws a head's lines, neighbours as one shape: columns down from the diagonal, slashes along it.
// They are pale if in the end the head is read whole. run (n): room.
static void map_lines(Report *r, const Lines *a, LineRange *run) {
    int n = a->n;
    int k = bit_runs(a->v, n, run);
    fprintf(r->f, "<path class=\"line%s\" d=\"", a->dense ? " whole" : "");
    for (int i = 0; i < k; i++)
        fprintf(r->f, "M%d %dV%dH%dV%dz", run[i].lo, run[i].lo, n, run[i].hi, run[i].hi);
    k = bit_runs(a->s, n, run);
    for (int i = 0; i < k; i++)
        fprintf(r->f, "M0 %dV%dL%d %dH%dz", run[i].lo, run[i].hi, n - run[i].hi, n, n - run[i].lo);
    fprintf(r->f, "\"/>");
}

// The lines that LoopServe takes for head h in a first prefill of T tokens. *found: what share of
// the attention they hold, in what share of the cells. q (T,H,D); w, tile: room.
static Lines map_choose(Session *s, const LoopServe *x, int l, int h, const float *q, int T,
                        LoopRoom *w, Tile *tile, LoopFound *found) {
    Lines a = { .n = T };
    a.v = scratch(s, bit_bytes(T));
    a.s = scratch(s, bit_bytes(T));
    LineSample p = { .n = T, .R = w->R, .P = w->P };
    p.m = sample_rows(T, x->m, 0, l, w->R);
    lines_clear(&a);
    line_probs(s, l, h, q, T, w->R, p.m, w->P, tile);
    *found = (LoopFound){ 1, 1 };
    if (x->rule.alpha >= 1) a.dense = 1;
    else loop_choose(x, &p, &a, w, found);
    return a;
}

// A token's text for a label: its first 8 characters, without the blanks at its ends, a line end as
// \\n. A method's own token has none.
static void tick_text(const Report *r, const Token *t, char out[64]) {
    int len = 0, n = 0, chars = 0;
    const char *b = t->id >= 0 ? tokenizer_bytes(r->a->tok, t->id, &len) : NULL;
    for (int i = 0; i < len && chars < 8; chars++) {
        int k = max_int(utf8_length(b + i, (size_t)(len - i)), 1);
        if (b[i] == '\n') n += sprintf(out + n, "\\n");
        else if (b[i] != ' ' || n) n += sprintf(out + n, "%.*s", k, b + i);
        i += k;
    }
    while (n && out[n - 1] == ' ') n--;
    out[n] = 0;
}

// The ticks of a map of T tokens: number and text on the left, the number below.
static void map_ticks(Report *r, const Token *tok, int T) {
    int step = max_int((int)nice_step(T, 8), 1);
    char text[64];
    for (int t = 0; t < T; t += step) {
        double at = (t + .5) * MAP_SIDE / T;
        tick_text(r, &tok[t], text);
        fprintf(r->f, "<path class=\"grid\" d=\"M%d %.1fh-3M%.1f %dv3\"/>", MAP_LEFT, MAP_TOP + at, MAP_LEFT + at,
                MAP_TOP + MAP_SIDE);
        fprintf(r->f, "<text class=\"tick\" x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%d ", MAP_LEFT - 5,
                MAP_TOP + at + 3, t);
        html_between(r->f, "", text, "</text>");
        fprintf(r->f, "<text class=\"tick\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n", MAP_LEFT + at,
                MAP_TOP + MAP_SIDE + 12, t);
    }
}

// Writes the figure of one head: the image with its ticks, a triangle over the cells above the diagonal, the
// lines, and the caption.
static void map_figure(Report *r, Session *s, const LoopServe *x, int l, int h, const float *q, int T,
                       LoopRoom *w, Tile *tile) {
    int side = min_int(T, MAP_SIDE);
    unsigned char *pixel = scratch(s, (size_t)side * side);
    LoopFound found;
    Lines a = map_choose(s, x, l, h, q, T, w, tile, &found);
    int columns = bit_list(a.v, T, NULL), diagonals = bit_list(a.s, T, NULL);
    map_pixels(s, l, h, q, T, side, tile, pixel);
    unsigned char *png = png_make(pixel, side, side);

    fprintf(r->f, "<figure data-l=\"%d\" data-h=\"%d\"%s>", l / map_step(s->c->L), h / map_step(s->c->H),
            a.dense ? "" : " data-lines=\"1\"");
    fprintf(r->f, "<svg viewBox=\"0 0 %d %d\" role=\"img\">",
            MAP_LEFT + MAP_SIDE + 8, MAP_TOP + MAP_SIDE + 16);
    map_ticks(r, s->tok, T);
    fprintf(r->f, "<g transform=\"translate(%d %d) scale(%.6g)\">", MAP_LEFT, MAP_TOP, (double)MAP_SIDE / T);
    fprintf(r->f, "<image width=\"%d\" height=\"%d\" preserveAspectRatio=\"none\" ", T, T);
    fprintf(r->f, "href=\"data:image/png;base64,");
    base64_write(r->f, png, arrlenu(png));
    fprintf(r->f, "\"/><path class=\"void\" d=\"M0 0H%dV%dz\"/>", T, T);
    map_lines(r, &a, scratch(s, (size_t)T * sizeof(LineRange)));
    fprintf(r->f, "</g></svg><figcaption>layer %d, head %d: ", l, h);
    fprintf(r->f, "%s%d columns and %d diagonals, %.0f %% of the cells, hold %.1f %% of the attention",
            a.dense ? "read whole, for " : "", columns, diagonals, 100 * found.cells, 100 * found.mass);
    fprintf(r->f, "</figcaption></figure>\n");
    csv_row(r, "attention", a.dense ? "dense" : "lines",
            "layer, head, share of cells, share of attention, verticals", l, h, found.cells, found.mass, columns);
    arrfree(png);
}

// A method's commit hook that writes the maps of layer l. q (T,H,D).
static void map_probe_commit(Session *s, void *ms, int l, const float *q, int T) {
    MapProbe *m = ms;
    if (l == s->c->L || l % map_step(s->c->L)) return;
    size_t mark = scratch_mark(s);
    Tile *tile = tiles_new(s);
    LoopRoom *w = loop_rooms(s, m->x->m, T);
    for (int h = 0; h < s->c->H; h += map_step(s->c->H)) {
        size_t inner = scratch_mark(s);
        map_figure(m->r, s, m->x, l, h, q, T, w, tile);
        scratch_reset(s, inner);
    }
    scratch_reset(s, mark);
}

// Rides on full attention as a second part; it is not in the table of methods.
static const Method map_probe = {
    .name = "maps",
    .state = sizeof(MapProbe),
    .commit = map_probe_commit,
};

// A slider from 0 to max that stands at `at`; one place is `step` layers or heads.
static void map_slider(FILE *f, const char *name, const char *id, int max, int at, int step) {
    fprintf(f, "<label>%s <input type=\"range\" id=\"%s\" ", name, id);
    fprintf(f, "min=\"0\" max=\"%d\" value=\"%d\" data-step=\"%d\"/> <output>0</output></label>", max, at, step);
}

// The switch for the lines and the sliders for layer and head. Without the script all maps show,
// and no slider.
static void map_controls(Report *r) {
    int L = r->a->c->L, H = r->a->c->H;
    int layers = (L - 1) / map_step(L), heads = (H - 1) / map_step(H);     // the sliders' last places
    fprintf(r->f, "<input type=\"checkbox\" id=\"lines\" checked=\"checked\"/>"
                  "<label for=\"lines\"> show LoopServe's lines</label>\n"
                  "<div class=\"sliders\">");
    map_slider(r->f, "layer", "map-l", layers, layers / 2, map_step(L));
    map_slider(r->f, "head", "map-h", heads, 0, map_step(H));
    fprintf(r->f, "</div>\n");
}

// Every third colour with its probability.
static void map_legend(Report *r) {
    char text[48];
    legend_begin(r->f);
    for (int i = 0; i < SHADES; i += 3) {
        double p = pow(10, 4.0 * i / (SHADES - 1) - 4);
        snprintf(text, sizeof text, i ? "%.2g" : "at most %.2g of a row's attention", p);
        legend_shade(r->f, i, text);
    }
    legend_end(r->f);
}

// The ids of the whole dialogue (stb array).
static int *dialogue_ids(const Report *r) {
    int *ids = NULL;
    for (int i = 0; i < DEMO_TURNS; i++) {
        const Turn *t = &r->script[i];
        ids = ids_put(ids, t->pre, (int)arrlen(t->pre));
        ids = ids_put(ids, t->dec, (int)arrlen(t->dec));
    }
    return ids;
}

static void draw_attention(Report *r) {
    LoopServe x = { 0 };
    Session *s = session_open(r->a->c, r->a->w, r->host, "full");
    picture_begin(r, "attention", "Where heads look, and the lines LoopServe keeps",
                  "One square per head: each row is a token that reads, each column a token that "
                  "is read, bright where much attention goes. White columns (single tokens everyone "
                  "reads) and diagonals (a fixed distance back) are the lines LoopServe would "
                  "compute in this prefill; all else is skipped. Where few lines do not hold "
                  "enough (dashed), the head is read whole. The numbers at the sides count tokens; "
                  "on the left stand their words too.");
    map_controls(r);
    fprintf(r->f, "<div class=\"maps\" id=\"maps\">\n");
    if (loopserve_p_open(s, &x)) die(EXIT_USAGE, "--report: %s", s->err);
    *(MapProbe *)observe(s, &map_probe) = (MapProbe){ r, &x };
    s->queries = INT_MAX;
    int *ids = dialogue_ids(r);
    prefill(s, ids, (int)arrlen(ids));
    fprintf(r->f, "</div>\n");
    map_legend(r);
    picture_note(r, "%d tokens, one prefill; alpha %g. Where a pixel covers several cells it shows the "
                    "largest. Logarithmic colours.", (int)arrlen(ids), x.rule.alpha);
    picture_end(r);
    arrfree(ids);
    session_close(s);
}

// ---- 8: the text, coloured by what is kept
// The whole dialogue once a method, as the method sees it at its last step: grey where no head
// reads a token, else one of eight strengths of one colour by the share of all heads that read it.
// The answer to the last question is underlined.

// The strength of a share: 0 where no head reads, 1..8 else.
static int text_shade(float share) {
    if (share <= 0) return 0;
    return (int)fminf(TEXT_SHADES, 1 + share * (TEXT_SHADES - .5f));
}

// Writes a run of text (stb array) in one strength, and empties it. answer 1: the run is the answer.
static void kept_run(FILE *f, char *run, int shade, int answer) {
    const char *tag = answer ? "b" : "span";
    fprintf(f, "<%s class=\"k%d\">", tag, shade);
    html_bytes(f, run, arrlenu(run));
    fprintf(f, "</%s>", tag);
    arrsetlen(run, 0);
}

// The dialogue's text as one method sees it. Tokens of one strength are one span, so that
// characters split over tokens stay whole. A method's own token is a diamond.
static void kept_text(Report *r, const DemoRun *d) {
    int n = (int)arrlen(d->tok), from, to;
    answer_at(r, d->tok, n, &from, &to);
    char *run = NULL;
    int run_shade = 0, run_answer = 0;
    fprintf(r->f, "<div class=\"tokens\">");
    for (int i = 0; i < n; i++) {
        int shade = text_shade(d->share[i]), answer = i >= from && i < to;
        int changes = shade != run_shade || answer != run_answer;
        if (changes && arrlen(run)) kept_run(r->f, run, run_shade, run_answer);
        run_shade = shade;
        run_answer = answer;

        const char *b = "\xe2\x97\x86";
        int len = 3;
        if (d->tok[i].id >= 0) b = tokenizer_bytes(r->a->tok, d->tok[i].id, &len);
        if (len) memcpy(arraddnptr(run, len), b, (size_t)len);
        csv_row(r, "text", d->name, "token, id, share of heads", i, d->tok[i].id, d->share[i], 0, 0);
    }
    if (arrlen(run)) kept_run(r->f, run, run_shade, run_answer);
    fprintf(r->f, "</div>\n");
    arrfree(run);
}

static void text_legend(Report *r) {
    legend_begin(r->f);
    fprintf(r->f, "<li><span class=\"tokens\"><span class=\"k0\"> grey </span></span> no head</li>"
                  "<li><span class=\"k1\"> word </span> few heads</li><li><span class=\"k4\"> word "
                  "</span> half</li><li><span class=\"k8\"> word </span> all "
                  "heads</li><li>\xe2\x97\x86 a row the method made itself, to stand for a whole "
                  "message (SONIC)</li>\n");
    legend_end(r->f);
}

// The heading of one method, with its answer, and its text. mean: the mean share over all tokens.
static void text_panel(Report *r, const DemoRun *d, double mean) {
    fprintf(r->f, "<div><h3>");
    marked_name(r->f, d->name);
    fprintf(r->f, ": reads %.0f %% of %d tokens; <span class=\"%s</span> ",
            mean, (int)arrlen(d->share), right_answer(d) ? "ok\">right:" : "bad\">wrong:");
    html_between(r->f, "", d->said ? d->said : "", "</h3>\n");
    kept_text(r, d);
    fprintf(r->f, "</div>\n");
}

static void draw_text(Report *r, const DemoRun *d) {
    int drawn = 0;
    picture_begin(r, "text", "What is still there when the last question is answered",
                  "The whole dialogue as each method sees it at its last step. The stronger the "
                  "colour, the more heads read that word; grey words are read by no head. Look at "
                  "the answer, underlined: where it is grey the method cannot know it, where it is "
                  "coloured it may.");
    text_legend(r);
    for (int i = 0; i < (int)arrlen(d); i++) {
        int n = (int)arrlen(d[i].share);
        float least = 1;
        double sum = 0;
        for (int j = 0; j < n; j++) {
            least = fminf(least, d[i].share[j]);
            sum += d[i].share[j];
        }
        if (*d[i].why || least > .999f) continue;       // a method that reads everything shows nothing
        if (!drawn) fprintf(r->f, "<div class=\"side\">\n");
        drawn = 1;
        text_panel(r, &d[i], 100 * sum / fmax(1, (double)n));
    }
    if (drawn) fprintf(r->f, "</div>\n");
    else picture_note(r, "Every method shown here reads every token in every head.");
    picture_end(r);
}

// ---- 9: where time goes
// Two bar charts, prefill and decode, with a bar a method: milliseconds for one token. A bar has
// four parts, one a kind of work; the longest bar of a chart has the full width.

// Milliseconds a token of one part of the work.
static double part_ms(const DemoRun *d, int phase, int part) {
    return 1e3 * d->seconds[phase][part] / (double)d->tokens[phase];
}

// Milliseconds a token of a whole phase.
static double phase_ms(const DemoRun *d, int phase) {
    double sum = 0;
    for (int k = 0; k < PHASE_PARTS; k++) sum += d->seconds[phase][k];
    return 1e3 * sum / (double)d->tokens[phase];
}

// One method's bar at height y. top: the milliseconds of the longest bar.
static void time_bar(Report *r, const DemoRun *d, int phase, int y, double top) {
    static const char *part[] = { "attention", "choosing rows", "bookkeeping", "the rest of the model" };
    double x = BARS_LEFT, sum = 0, mark = mark_width(d->name);
    fprintf(r->f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"end\">%.*s</text>", x - mark - 6, y + 16,
            (int)((x - mark - 6) / LETTER), d->name);
    mark_draw(r->f, d->name, x - 3 - mark / 2, y + 12);
    for (int k = 0; k < PHASE_PARTS; k++) {
        double ms = part_ms(d, phase, k);
        double w = top > 0 ? ms / top * (CHART_W - BARS_LEFT - 80) : 0;
        fprintf(r->f, "<rect class=\"p%d\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"17\">", k, x, y + 3, w);
        fprintf(r->f, "<title>%s: %.4f ms</title></rect>", part[k], ms);
        csv_row(r, "time", d->name, part[k], phase, k, ms, 0, 0);
        x += w;
        sum += ms;
    }
    fprintf(r->f, "<text x=\"%.1f\" y=\"%d\">%.3f ms</text>\n", x + 6, y + 16, sum);
}

// The bar chart of one phase.
static void time_bars(Report *r, const DemoRun *d, int phase) {
    double top = 0;                                     // the longest bar
    int n = 0, y = 0;
    for (int i = 0; i < (int)arrlen(d); i++) {
        if (!d[i].tokens[phase]) continue;
        top = fmax(top, phase_ms(&d[i], phase));
        n++;
    }
    panel_begin(r->f, phase == PHASE_DECODE ? "Decode: one new token" : "Prefill: one token of the prompt");
    svg_begin(r->f, "chart", CHART_W, 24 * n + 8);
    for (int i = 0; i < (int)arrlen(d); i++) {
        if (!d[i].tokens[phase]) continue;
        time_bar(r, &d[i], phase, y, top);
        y += 24;
    }
    fprintf(r->f, "</svg></div>\n");
}

static void draw_time(Report *r, const DemoRun *d) {
    picture_begin(r, "time", "Where the time goes",
                  "Milliseconds for one token of the built-in dialogue, on this machine. On a "
                  "small model and a short text the rest of the model dominates; attention and "
                  "what a method adds to it grow with the length of the text. Compare shares, not "
                  "machines; --bench measures speed properly.");
    fprintf(r->f, "<div class=\"charts\">\n");
    for (int phase = 0; phase < PHASES; phase++) time_bars(r, d, phase);
    fprintf(r->f, "</div>\n");
    legend_begin(r->f);
    legend_box(r->f, "p0", "attention (in a prefill also LoopServe's choice of lines)");
    legend_box(r->f, "p1", "choosing the rows to read");
    legend_box(r->f, "p2", "bookkeeping: indexing, packing, dropping rows");
    legend_box(r->f, "p3", "the rest of the model");
    legend_end(r->f);
    picture_end(r);
}

// ---- the whole page

// NAME.html or NAME.htm -> NAME.csv, any other name with .csv behind it; malloc'd.
static char *csv_path(const char *path) {
    size_t n = strlen(path);
    char *csv = xmalloc(n + 5);
    if (n > 5 && !strcmp(path + n - 5, ".html")) n -= 5;
    else if (n > 4 && !strcmp(path + n - 4, ".htm")) n -= 4;
    snprintf(csv, n + 5, "%.*s.csv", (int)n, path);
    return csv;
}

// Ends the program if the page or its table cannot be written. Called before any work is done.
void report_check(const char *path) {
    char err[512], *csv = csv_path(path);
    if (save_check(path, err) || save_check(csv, err)) die(EXIT_RUN, "--report %s", err);
    free(csv);
}

static void source_put(Report *r, const char *s) { memcpy(arraddnptr(r->source, strlen(s)), s, strlen(s)); }

// Appends one word of the command line as a shell would take it: in single quotes where it has a
// special character.
static void source_word(Report *r, const char *word) {
    int plain = *word && !word[strcspn(word, " \t\n\"'\\$&|;<>()*?`!#~")];
    if (plain) {
        source_put(r, word);
        return;
    }
    arrput(r->source, '\'');
    for (const char *p = word; *p; p++) {
        if (*p == '\'') source_put(r, "'\\''");
        else arrput(r->source, *p);
    }
    arrput(r->source, '\'');
}

// Makes Report.source: the command line, the model and its shape, the seeds, the version.
static void report_source(Report *r) {
    const Config *c = r->a->c;
    char text[160];
    for (int i = 0; i < arg_count; i++) {
        if (i) arrput(r->source, ' ');
        source_word(r, args[i]);
    }
    source_put(r, " | model ");
    source_put(r, c->dir);
    snprintf(text, sizeof text,
             " (%d layers, %d heads, %d KV heads of %d) | greedy, --seed %d, --eval-seed %d | "
             "kvcomp %s",
             c->L, c->H, c->G, c->D, opt_int(r->a->o, "seed"), opt_int(r->a->o, "eval-seed"), KVCOMP_VERSION);
    source_put(r, text);
    arrput(r->source, 0);
}

// The options of the demonstration: the user's, with demo_values where nothing is given, greedy,
// and the first budget of --budgets or --budget, at most DEMO_MOST. With --ratio the budget stays
// as it is.
static Options *demo_options(const App *a) {
    Options *o = options_copy(a->o);
    char err[256], budget[160] = "";
    for (int i = 0; i < DEMO_VALUES; i++)
        if (!opt_given(o, demo_values[i][0])) options_set(o, demo_values[i][0], demo_values[i][1], err);
    list_word(*opt_str(o, "budgets") ? opt_str(o, "budgets") : opt_str(o, "budget"), 0, budget);
    if (atoi(budget) > DEMO_MOST) snprintf(budget, sizeof budget, "%d", DEMO_MOST);
    if (atoi(budget) <= 0) snprintf(budget, sizeof budget, "%d", DEMO_BUDGET);
    if (!opt_given(o, "ratio")) options_set(o, "budget", budget, err);
    options_set(o, "temp", "0", err);
    return o;
}

// The page up to the first picture, and the header of the table of numbers.
static void report_head(Report *r) {
    static const char *parts[][2] = {                   // id of a picture, its name in the list of links
        { "pareto", "quality and bytes" },
        { "needle", "needles" },
        { "memory", "memory" },
        { "heads", "heads" },
        { "pats", "bits" },
        { "lychee", "tree" },
        { "attention", "attention" },
        { "text", "kept text" },
        { "time", "time" },
    };
    fputs("<!DOCTYPE html>\n"
          "<html lang=\"en\">\n"
          "<head>\n"
          "<meta charset=\"utf-8\"/>\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
          "<title>kvcomp report</title>\n"
          "<style>\n", r->f);
    fputs(report_style, r->f);
    report_colours(r->f);
    report_shades(r->f);
    fputs("</style>\n"
          "</head>\n"
          "<body>\n"
          "<h1>kvcomp: what KV-cache compression keeps, and what it costs</h1>\n"
          "<p class=\"how\">A language model remembers a conversation as rows of numbers: two (key "
          "and value) for every token, in every layer and KV head. Together they are the KV cache, "
          "and it grows with every word. The methods on this page make it smaller or read less of "
          "it: some drop rows, some keep all but read few, some store fewer bits.</p>\n"
          "<nav>", r->f);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        fprintf(r->f, "<a href=\"#%s\">%zu %s</a> ", parts[i][0], i + 1, parts[i][1]);
    fprintf(r->f, "</nav>\n");
    fprintf(r->csv, "picture,series,what,x,y,value,lo,hi\n");
}

// The dialogue with full attention's replies, as a table to open.
static void report_script(Report *r) {
    fprintf(r->f, "<details><summary>The questions, and full attention's replies</summary>\n"
                  "<table><tr><th>turn</th><th class=\"t\">the user says</th>"
                  "<th class=\"t\">full attention replies</th></tr>\n");
    for (int i = 0; i < DEMO_TURNS; i++) {
        const int *reply = r->script[i].dec;
        fprintf(r->f, "<tr><td>%d</td>", i + 1);
        html_between(r->f, "<td class=\"t\">", demo_turns[i], "</td>");
        fprintf(r->f, "<td class=\"t\">");
        for (int j = 0; j < (int)arrlen(reply); j++) {
            Token t = { .id = reply[j] };
            tokens_text(r, &t, 1);
        }
        fprintf(r->f, "</td></tr>\n");
    }
    fprintf(r->f, "</table></details>\n");
}

// What pictures 3 to 9 were made from: the budget, the options, the dialogue.
static void report_demo(Report *r) {
    const char *limit = opt_given(r->o, "ratio") ? "ratio" : "budget";
    fprintf(r->f, "<section>\n<p class=\"how\">The pictures below come from one short conversation, played through "
                  "every method with --%s %s. The methods get the same words; each answers the last "
                  "question itself. So that methods made for long texts show themselves on a short "
                  "one, these options were set unless given: ",
            limit, opt_str(r->o, limit));
    for (int i = 0; i < DEMO_VALUES; i++)
        fprintf(r->f, "%s--%s %s", i ? ", " : "", demo_values[i][0], opt_str(r->o, demo_values[i][0]));
    fprintf(r->f, ".</p>\n");
    report_script(r);
    fprintf(r->f, "</section>\n");
}

// The script of the sliders of picture 7: one map at a time. It starts with the last map whose head
// is not read whole.
static const char *report_script_text =
    "<script>\n"
    "(function(){var d=document,m=d.getElementById('maps'),l=d.getElementById('map-l'),h=d.getEleme"
    "ntById('map-h');\n"
    "d.documentElement.classList.add('js');"
    "m.classList.add('one');\n"

    // Shows the figure of the chosen layer and head, and the sliders' values in the model's own
    // numbers.
    "function show(){"
    "m.querySelectorAll('figure').forEach(function(f){"
    "f.classList.toggle('on',f.dataset.l==l.value?f.dataset.h==h.value:false)"
    "});\n"
    "[l,h].forEach(function(x){"
    "x.parentNode.querySelector('output').textContent=x.value*x.dataset.step"
    "})"
    "}\n"

    "l.oninput=h.oninput=show;"
    "var s=m.querySelectorAll('figure[data-lines]'),f=s[s.length-1];"
    "if(f){l.value=f.dataset.l;h.value=f.dataset.h}"
    "show()"
    "})();\n"
    "</script>\n";

static void report_foot(Report *r) {
    fputs(report_script_text, r->f);
    fputs("</body>\n</html>\n", r->f);
}

// Draws the nine pictures in order. The demonstration is played behind the first two.
static void report_pictures(Report *r, const Score *rows) {
    draw_pareto(r, rows);
    draw_needle(r, rows);
    DemoRun *d = demo_runs(r);
    report_demo(r);
    draw_memory(r, d);
    draw_heads(r);
    draw_pats(r);
    draw_lychee(r);
    draw_attention(r);
    draw_text(r, d);
    draw_time(r, d);
    demo_free(d);
}

// Writes the page and its numbers, which take their places together. rows: what was evaluated (stb
// array), or NULL. chosen: "" when the user asked for the evaluation, else the options of the default
// one, or why there are no rows. Ends the program when writing fails.
int report_write(App *a, const char *path, const Score *rows /* stb_ds */, const char *chosen) {
    char err[512], *csv = csv_path(path);
    Saving out[2];                          // the page, the table
    if (save_begin_open(&out[0], path, err) || save_begin_open(&out[1], csv, err)) die(EXIT_RUN, "--report %s", err);
    Report r = { .a = a, .f = out[0].f, .csv = out[1].f, .o = demo_options(a), .chosen = chosen };
    r.host = options_copy(r.o);
    options_set(r.host, "device", "cpu", err);
    report_source(&r);
    report_head(&r);
    report_pictures(&r, rows);
    report_foot(&r);
    if (save_keep(out, 2, err)) die(EXIT_RUN, "--report %s", err);

    if (!quiet) tell("report: %s, numbers in %s", path, csv);
    while (arrlen(r.script)) turn_free(arrpop(r.script));
    arrfree(r.script);
    arrfree(r.source);
    options_free(r.o);
    options_free(r.host);
    free(csv);
    return 0;
}

// ---- the default evaluation
enum { DEFAULT_EVAL_TOKENS = 640 };                     // what its longest item may need

// Why this model gets no default evaluation; NULL: it gets one. It reads about 83,000 tokens, which
// takes one core some six seconds with the shipped model's 3 million parameters, and more with more.
static const char *default_eval_refused(const App *a) {
    enum { MILLIONS = 20 };                             // most parameters
    if (parameters_of(a->c) > (size_t)MILLIONS * 1000000)
        return "the default evaluation takes seconds with a model of up to 20 million parameters, and this "
               "one has more";
    if (ctx_limit(a) < DEFAULT_EVAL_TOKENS) return "the items of the default evaluation do not fit into the context";
    return NULL;
}

// The options of the default evaluation: the user's, and default_eval where nothing is given. The
// methods are full attention and those of the demonstration that fit the model and the options. A line
// on stderr says which one has too few positions.
static Options *default_eval_options(const App *a) {
    Options *o = options_copy(a->o);
    const char *list = opt_given(o, "method") ? opt_str(o, "method") : demo_methods;
    char err[512], name[160], budget[160] = "", methods_text[2048] = "full";
    int limited = opt_given(o, "budget") || opt_given(o, "ratio");
    for (int i = 0; i < DEFAULT_EVALS; i++) {
        const char *option = default_eval[i][0];
        if (opt_given(o, option) || (limited && !strcmp(option, "budgets"))) continue;
        options_set(o, option, default_eval[i][1], err);
    }
    options_set(o, "temp", "0", err);

    Options *first = options_copy(o);                   // with the first budget
    list_word(opt_str(o, "budgets"), 0, budget);
    if (*budget) options_set(first, "budget", budget, err);
    for (int i = 0; list_word(list, i, name); i++) {
        Session *s = strcmp(name, "full") ? session_try(a->c, a->w, first, name, err) : NULL;
        size_t n = strlen(methods_text);
        int few = s && s->pos_end && s->pos_end < DEFAULT_EVAL_TOKENS;
        if (few && !quiet)
            warn("%s is left out of the default evaluation: its items take up to %d positions, this method goes to "
                 "max_position_embeddings %d", name, DEFAULT_EVAL_TOKENS, s->pos_end);
        if (s && !few) snprintf(methods_text + n, sizeof methods_text - n, ",%s", name);
        session_close(s);
    }
    options_free(first);
    options_set(o, "compare", methods_text, err);
    return o;
}

// --report without --eval: evaluates a little, then writes the page. Returns 0.
int report(App *a, const char *path) {
    const char *refused = default_eval_refused(a);
    if (refused) return report_write(a, path, NULL, refused);

    static const char *said[] = { "eval", "eval-items", "eval-length", "eval-seed", "compare", "budgets",
                                  "budget", "ratio" };
    Options *own_options = a->o, *o = default_eval_options(a);
    Session *own = a->s;
    EvalSet e = { 0 };
    OpenRow *open = NULL;
    char chosen[3072] = "";
    a->o = o;
    eval_items(a, opt_str(o, "eval"), &e);
    Score *rows = open_rows(a, &open);
    play_items(a, &e, rows, open, 0, NULL);
    for (int i = 0; i < (int)arrlen(rows); i++) {
        finish_row(&rows[i], (uint64_t)opt_int(o, "eval-seed"));
        open_close(&open[i]);
    }
    for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
        size_t n = strlen(chosen);
        if (!opt_given(o, said[i])) continue;
        snprintf(chosen + n, sizeof chosen - n, "%s--%s %s", n ? " " : "", said[i], opt_str(o, said[i]));
    }
    a->o = own_options;
    a->s = own;
    report_write(a, path, rows, chosen);
    rows_free(rows);
    arrfree(open);
    eval_set_free(&e);
    options_free(o);
    return 0;
}

// ==================================================================================================== BROWSER
// `make web` compiles this file to WebAssembly and writes it, the shipped model and data/web.html
// into one page, kvcomp.html. A Web Worker of that page calls the functions below, one at a time. A
// side is a session with its own record, as in app/chat. Up to four sides answer side by side, and
// the last one follows one of them, token by token, with the method of the picture that is looked
// at. Replies are greedy. The tests call the same functions without a browser.
//
// What a function returns as text is JSON unless it says otherwise, and lasts until the next call.
// What the program says on stderr the worker shows too.
#if defined(__EMSCRIPTEN__) || defined(KVCOMP_NO_MAIN)
#define WEB __attribute__((used))       // a function that the worker calls

enum {
    WEB_SIDES  = 5,
    WEB_FOLLOW = WEB_SIDES - 1,         // the side that follows another
    WEB_MAP    = 512,                   // tokens of an attention map, at most
};

typedef struct {
    Side side;              // session, record, options; side.app.s NULL: not open
    Decoder reply;          // the text of the reply that is made
    Decoder all;            // the text of all tokens
    int made;               // tokens of the reply so far
    double read;            // bytes of rows that the last step read
} WebSide;

static App web;                         // model, tokenizer, template and options of all sides
static WebSide web_side[WEB_SIDES];
static char *web_text;                  // what the last call returned
static size_t web_size;
static const char *web_too_long = "the dialogue is longer than the positions of the model";
static float *web_queries;              // (L,H,D): the queries of the follower's last step
static struct {                         // the attention map that is drawn
    LoopServe x;
    int l, h;
    FILE *f;
} web_map;

static FILE *web_begin(void) {
    free(web_text);
    web_text = NULL;
    return memory_stream(&web_text, &web_size);
}

static const char *web_end(FILE *f) {
    memory_stream_close(f);
    return web_text;
}

// "key":[x[0],..], with the comma behind it.
static void web_reals(FILE *f, const char *key, const double *x, int n) {
    fprintf(f, "\"%s\":[", key);
    for (int i = 0; i < n; i++) {
        if (i) fputc(',', f);
        json_real(f, x[i], 6);
    }
    fputs("],", f);
}

static void web_ints(FILE *f, const char *key, const int *x, int n) {
    fprintf(f, "\"%s\":[", key);
    for (int i = 0; i < n; i++) fprintf(f, "%s%d", i ? "," : "", x[i]);
    fputs("],", f);
}

// ---- the model and its methods

// The methods of section 15, in its order.
static void web_methods(FILE *f) {
    fputs("\"methods\":[", f);
    EACH_METHOD(m) {
        fputs(m == methods ? "{" : ",{", f);
        json_pair(f, "name", (*m)->name);
        json_pair(f, "paper", (*m)->paper);
        json_pair(f, "keeps", (*m)->keeps);
        fprintf(f, "\"budget\":%d}", (*m)->budget);
    }
    fputs("],", f);
}

// The lines of --demo, with the answers of those that ask, and the values that show a method at
// work on a short dialogue (app/page).
static void web_script(FILE *f) {
    fputs("\"script\":[", f);
    for (int i = 0; i < N_DEMO_LINES; i++) {
        fputs(i ? ",{" : "{", f);
        if (demo_lines[i].answer) json_pair(f, "answer", demo_lines[i].answer);
        json_pair(f, "user", demo_lines[i].user);
        fputs("\"n\":0}", f);
    }
    fputs("],\"values\":[", f);
    for (int i = 0; i < DEMO_VALUES; i++) fprintf(f, "%s\"%s=%s\"", i ? "," : "", demo_values[i][0], demo_values[i][1]);
    fputs("],", f);
}

// Opens the model of this folder: its shape, the methods, the script.
WEB const char *web_open(const char *dir) {
    char err[512];
    web = (App){ .o = options_of_program() };
    if (options_set(web.o, "model", dir, err) || options_set(web.o, "temp", "0", err)) die(EXIT_USAGE, "%s", err);
    web.c = config_load(dir);
    web.w = weights_load(web.c);
    open_tokenizer(&web, 1);
    web_queries = xcalloc((size_t)web.c->L * web.c->H * web.c->D, sizeof *web_queries);

    FILE *f = web_begin();
    Report r = { .a = &web, .o = web.o };
    fputs("{", f);
    web_methods(f);
    web_script(f);
    fprintf(f, "\"L\":%d,\"H\":%d,\"G\":%d,\"D\":%d,", web.c->L, web.c->H, web.c->G, web.c->D);
    fprintf(f, "\"fact_head\":%d,\"context\":%d,", fact_head(&r, 1), ctx_limit(&web));
    fprintf(f, "\"simd\":\"%s\",\"version\":\"%s\"}", simd_name(), KVCOMP_VERSION);
    return web_end(f);
}

// Notes the follower's queries for LycheeCluster's tree. It rides on the method as a second part and
// is not in the table of methods. q (H,D).
static void web_probe_select(Session *s, void *ms, int l, const float *q) {
    size_t n = (size_t)s->c->H * s->c->D;
    (void)ms;
    memcpy(web_queries + (size_t)l * n, q, n * sizeof *q);
}

static const Method web_probe = { .name = "probe", .select = web_probe_select };

// Options of a side: the model's, and lines of "name=value". NULL, and the reason in err, when a
// line cannot be taken.
static Options *web_options(const char *lines, char err[256]) {
    Options *o = options_copy(web.o);
    char *text = copy_text(lines), *rest = NULL;
    int bad = 0;
    for (char *line = strtok_r(text, "\n", &rest); line && !bad; line = strtok_r(NULL, "\n", &rest)) {
        char *value = strchr(line, '=');
        if (value) *value++ = 0;
        bad = options_set(o, line, value ? value : "1", err) || out_of_range(o, line, err);
    }
    free(text);
    if (!bad) return o;
    options_free(o);
    return NULL;
}

// Opens side i with a method and options, and plays its record into it; in the middle of a reply,
// the reply goes on by the new method. "" (no JSON), or the reason why the side stays as it is.
WEB const char *web_method(int i, const char *method, const char *options) {
    WebSide *x = &web_side[i];
    Side now = { 0 };
    char err[512] = "";
    Options *o = web_options(options, err);
    FILE *f = web_begin();
    if (o) {
        side_open(&now, &web, o, method, NULL);
        options_free(o);
        if (now.app.s && x->side.app.turn && !record_fits(now.app.s, x->side.app.turn, now.refused) &&
            record_overflows(&now.app, x->side.app.turn))
            snprintf(now.refused, sizeof now.refused, "%s", web_too_long);
        snprintf(err, sizeof err, "%s", now.refused);
    }
    if (!*err) {
        if (i == WEB_FOLLOW) observe(now.app.s, &web_probe);
        now.app.turn = x->side.app.turn;
        now.app.closed = x->side.app.closed;
        x->side.app.turn = NULL;
        if (x->side.app.o) side_close(&x->side);
        x->side = now;
        x->reply.t = x->all.t = web.tok;
        x->reply.skip_special = 1;
        x->read = 0;
        x->side.app.stale = 1;
        (void)session_ready(&x->side.app);
    } else if (o) {
        side_close(&now);
    }
    fputs(err, f);
    return web_end(f);
}

// Forgets the dialogue of side i.
WEB void web_clear(int i) {
    if (web_side[i].side.app.s) (void)chat_clear(&web_side[i].side.app);
}

// Closes side i.
WEB void web_close(int i) {
    if (web_side[i].side.app.o) side_close(&web_side[i].side);
    web_side[i] = (WebSide){ 0 };
}

// ---- a turn

// Feeds a message to side i. 0, or -1: it does not fit, and a line on stderr says why.
WEB int web_say(int i, const char *text) {
    WebSide *x = &web_side[i];
    App *a = &x->side.app;
    char err[512];
    Turn t = render_turn(a, text, err);
    if (*err) warn("%s", err);
    if (!arrlen(t.pre) || !message_known(a, &t) || !message_fits(a, max_int((int)arrlen(t.pre) - t.back, 0))) {
        turn_free(t);
        return -1;
    }
    session_take_back(a, &t);
    arrput(a->turn, t);
    feed_prefill(a, &t);
    a->closed = 0;
    x->made = 0;
    x->read = 0;
    x->reply = (Decoder){ .t = web.tok, .skip_special = 1 };
    return 0;
}

// One step of the reply of side i, of at most n tokens, as generate does it: the text that came,
// and whether the reply goes on.
WEB const char *web_step(int i, int n) {
    WebSide *x = &web_side[i];
    App *a = &x->side.app;
    char *text = NULL;
    double before = a->s->clk.bytes_attended;
    int id = x->made < n ? sample(a) : -1;
    int more = id >= 0 && !is_stop(a, id) && reply_has_room(a);
    if (more) {
        text = decode_token(&x->reply, id, text);
        arrput(arrlast(a->turn).dec, id);
        feed_decode(a, id);
        x->made++;
        x->read = a->s->clk.bytes_attended - before;
    } else {
        text = decode_flush(&x->reply, text);
    }
    FILE *f = web_begin();
    fprintf(f, "{\"more\":%d,\"text\":", more);
    json_escape(f, text ? text : "", arrlenu(text));
    fputc('}', f);
    arrfree(text);
    return web_end(f);
}

// Do the turns `now` go on where `had` ends?
static int web_goes_on(const Turn *had, const Turn *now) {
    int n = (int)arrlen(had);
    if (n > (int)arrlen(now)) return 0;
    for (int k = 0; k < n; k++) {
        const Turn *a = &had[k], *b = &now[k];
        size_t pre = arrlenu(a->pre), dec = arrlenu(a->dec);
        if (pre != arrlenu(b->pre) || dec > arrlenu(b->dec)) return 0;
        if (k < n - 1 && dec != arrlenu(b->dec)) return 0;
        if (memcmp(a->pre, b->pre, pre * sizeof *a->pre)) return 0;
        if (dec && memcmp(a->dec, b->dec, dec * sizeof *a->dec)) return 0;
    }
    return 1;
}

// Side i is fed what side `of` has said and heard, as far as it does not know it. "" (no JSON), or the
// reason why it cannot follow.
WEB const char *web_follow(int i, int of) {
    App *a = &web_side[i].side.app;
    const Turn *now = web_side[of].side.app.turn;
    char err[512] = "";
    if (!web_goes_on(a->turn, now) && chat_clear(a)) return "the dialogue cannot be begun anew";
    if (!record_fits(a->s, now, err) && record_overflows(a, now))
        snprintf(err, sizeof err, "%s", web_too_long);
    for (int k = max_int((int)arrlen(a->turn) - 1, 0); k < (int)arrlen(now) && !*err; k++) {
        if (k == (int)arrlen(a->turn)) {
            Turn t = now[k];
            t.pre = ids_put(NULL, now[k].pre, (int)arrlen(now[k].pre));
            t.dec = NULL;
            t.user = now[k].user ? copy_text(now[k].user) : NULL;
            t.reply = now[k].reply ? copy_text(now[k].reply) : NULL;
            arrput(a->turn, t);
            feed_prefill(a, &t);
        }
        for (int j = (int)arrlen(a->turn[k].dec); j < (int)arrlen(now[k].dec); j++) {
            arrput(a->turn[k].dec, now[k].dec[j]);
            feed_decode(a, now[k].dec[j]);
        }
    }
    FILE *f = web_begin();
    fputs(err, f);
    return web_end(f);
}

// ---- what a side holds

// The tokens of side i from number `from` on, which is 0 or the end of what the last call gave:
// [text, TOK_*, segment, position].
WEB const char *web_tokens(int i, int from) {
    WebSide *x = &web_side[i];
    const Session *s = x->side.app.s;
    char *text = NULL;
    FILE *f = web_begin();
    if (!from) x->all = (Decoder){ .t = web.tok };
    fputc('[', f);
    for (int t = from; t < s->n_tok; t++) {
        if (s->tok[t].id >= 0) text = decode_token(&x->all, s->tok[t].id, text);
        fputs(t > from ? ",[" : "[", f);
        json_escape(f, text ? text : "", arrlenu(text));
        fprintf(f, ",%d,%d,%d]", s->tok[t].kind, s->tok[t].seg, s->tok[t].pos);
        arrsetlen(text, 0);
    }
    fputc(']', f);
    arrfree(text);
    return web_end(f);
}

// For each of the n_tok tokens of side i, in (L*G + L*H + 7) / 8 bytes: bit l*G + g says that this
// KV head holds a row of it, bit L*G + l*H + h that this query head read one in the last step.
WEB const unsigned char *web_masks(int i) {
    static unsigned char *mask;
    static int *rows;
    const Session *s = web_side[i].side.app.s;
    int L = s->c->L, H = s->c->H, G = s->c->G, wide = (L * G + L * H + 7) / 8;
    arrsetlen(mask, (size_t)s->n_tok * wide + 1);
    arrsetlen(rows, (size_t)s->n_tok + 1);
    memset(mask, 0, arrlenu(mask));
    for (int l = 0; l < L; l++)
        for (int h = 0; h < H; h++) {
            const KVHead *head = kv_head(s, l, h * G / H);
            int kept = l * G + h * G / H, read = L * G + l * H + h, n = view_rows(s, l, h, rows);
            for (int r = 0; r < head->len; r++)
                mask[(size_t)head->src[r] * wide + kept / 8] |= (unsigned char)(1 << kept % 8);
            for (int r = 0; r < n; r++)
                mask[(size_t)head->src[rows[r]] * wide + read / 8] |= (unsigned char)(1 << read % 8);
        }
    return mask;
}

// The bytes of the rows that a session holds, without the room that is taken ahead (kv_bytes counts
// it), and those of full attention's.
static size_t web_rows_bytes(const Session *s) {
    size_t n = 0, row = s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D);
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        const KVHead *h = &s->head[i];
        n += 2 * h->pk_bytes + (size_t)(h->len - h->packed) * row;
    }
    return n;
}

static size_t web_rows_full(const Session *s) {
    size_t row = full_format(s, 0)->row_bytes(s->c->D) + full_format(s, 1)->row_bytes(s->c->D);
    return (size_t)s->c->L * s->c->G * (size_t)tokens_said(s) * row;
}

// Bytes, rows and speed of side i; rows 1: also every row held and every view, as --json-rows has
// them.
WEB const char *web_facts(int i, int rows) {
    const WebSide *x = &web_side[i];
    const App *a = &x->side.app;
    char words[96];
    FILE *f = web_begin();
    rows_in_words(a->s, words);
    fputs("{", f);
    json_pair(f, "method", a->method);
    json_pair(f, "label", x->side.label);
    json_pair(f, "rows_in_words", words);
    json_pair(f, "saves", what_is_saved(a->s));
    json_bytes(a->s, f);
    json_speed(a, f);
    fprintf(f, "\"rows_bytes\":%zu,\"rows_full\":%zu,", web_rows_bytes(a->s), web_rows_full(a->s));
    fprintf(f, "\"read\":%.0f,\"tokens\":%d,\"turns\":%d,\"made\":%d,", x->read, a->s->n_tok, a->s->turn, x->made);
    fprintf(f, "\"budget\":%d,\"budgeted\":%d,\"longest\":%d", a->s->budget, uses_budget(a->s), rows_held(a));
    if (rows) {
        json_rows(a->s, f);
        json_views(a->s, f);
    }
    fputs("}", f);
    return web_end(f);
}

// ---- the papers' pictures, drawn from the follower

// Neighbouring lines as ranges [lo,hi).
static void web_runs(FILE *f, const char *key, const uint64_t *bits, int n, LineRange *run) {
    int k = bit_runs(bits, n, run);
    fprintf(f, "\"%s\":[", key);
    for (int i = 0; i < k; i++) fprintf(f, "%s[%d,%d]", i ? "," : "", run[i].lo, run[i].hi);
    fputs("],", f);
}

// A method's commit hook that writes the map of one head. q (T,H,D).
static void web_map_commit(Session *s, void *ms, int l, const float *q, int T) {
    (void)ms;
    if (l != web_map.l) return;
    size_t mark = scratch_mark(s);
    int side = min_int(T, MAP_SIDE);
    Tile *tile = tiles_new(s);
    LoopRoom *w = loop_rooms(s, web_map.x.m, T);
    unsigned char *pixel = scratch(s, (size_t)side * side);
    LoopFound found;
    Lines a = map_choose(s, &web_map.x, l, web_map.h, q, T, w, tile, &found);
    map_pixels(s, l, web_map.h, q, T, side, tile, pixel);
    fprintf(web_map.f, "{\"tokens\":%d,\"side\":%d,\"dense\":%d,", T, side, a.dense);
    fprintf(web_map.f, "\"cells\":%.6f,\"mass\":%.6f,", found.cells, found.mass);
    LineRange *run = scratch(s, (size_t)T * sizeof *run);
    web_runs(web_map.f, "columns", a.v, T, run);
    web_runs(web_map.f, "slashes", a.s, T, run);
    fputs("\"shades\":\"", web_map.f);
    for (int i = 0; i < side * side; i++) fprintf(web_map.f, "%x", pixel[i]);
    fputs("\"}", web_map.f);
    scratch_reset(s, mark);
}

static const Method web_map_probe = { .name = "map", .commit = web_map_commit };

// The attention map of query head h of layer l over the first tokens of the follower's dialogue, in one
// prefill, and the lines that LoopServe chooses there with the follower's options.
WEB const char *web_lines(int l, int h) {
    const App *a = &web_side[WEB_FOLLOW].side.app;
    char err[512];
    int *ids = NULL;
    for (int k = 0; k < (int)arrlen(a->turn); k++) {
        ids = ids_put(ids, a->turn[k].pre, (int)arrlen(a->turn[k].pre));
        ids = ids_put(ids, a->turn[k].dec, (int)arrlen(a->turn[k].dec));
    }
    FILE *f = web_begin();
    Session *s = session_try(a->c, a->w, a->o, "full", err);
    memset(&web_map, 0, sizeof web_map);
    web_map.l = l;
    web_map.h = h;
    web_map.f = f;
    if (ids && s && !loopserve_p_open(s, &web_map.x)) {
        observe(s, &web_map_probe);
        s->queries = INT_MAX;
        prefill(s, ids, min_int((int)arrlen(ids), WEB_MAP));
    } else {
        fputs("{\"tokens\":0}", f);
    }
    session_close(s);
    arrfree(ids);
    return web_end(f);
}

// PATS, which the follower plays: the bits that the rows of every token have lost, those that the
// schedule asks for, and the key row of token t in the layers' middle as f16 numbers.
WEB const char *web_bits(int t) {
    const Session *s = web_side[WEB_FOLLOW].side.app.s;
    const Pats *x = s->part[0].ms;
    int n = s->n_tok, D = s->c->D, *lost = NULL, *due = NULL, *row = NULL;
    float key[PATS_MAX_D];
    uint16_t half[PATS_MAX_D];
    for (int i = 0; i < n; i++) {
        arrput(lost, i < x->cut ? x->bits[i] : 0);
        arrput(due, pats_bits(x, i, n));
    }
    if (t >= 0 && t < n) {
        kv_load_k(s, kv_head(s, s->c->L / 2, 0), NULL, t, 1, key);
        from_f32(half, key, DT_F16, (size_t)D);
        for (int i = 0; i < D; i++) arrput(row, half[i]);
    }
    FILE *f = web_begin();
    fputs("{", f);
    web_ints(f, "lost", lost, n);
    web_ints(f, "due", due, n);
    web_ints(f, "row", row, (int)arrlen(row));
    fprintf(f, "\"window\":%d,\"sink\":%d,\"least\":%d,\"most\":%d,\"layer\":%d}", x->window, x->sink, x->b_min,
            x->b_max, s->c->L / 2);
    arrfree(lost);
    arrfree(due);
    arrfree(row);
    return web_end(f);
}

// One node of the tree: its scores, without the end of the object.
static void web_node(FILE *f, TreeView *v, const Nodes *u, int node) {
    fprintf(f, "{\"id\":%d,\"match\":%.4f,\"slack\":%.4f,", node, node_match(v, u, node), node_slack(v, u, node));
}

// The clusters of a list (by_score), the best first, with their chunks: [from, to, read].
static void web_clusters(FILE *f, TreeView *v, const int *of, int above) {
    int *order = by_score(v, &v->t->fine, of, above);
    fputs("\"clusters\":[", f);
    for (int i = 0; i < (int)arrlen(order); i++) {
        if (i) fputc(',', f);
        web_node(f, v, &v->t->fine, order[i]);
        fputs("\"chunks\":[", f);
        int begun = 0;
        for (int j = 0; j < v->x->M; j++) {
            const int *start = v->x->start;
            if (v->t->fine.of[j] != order[i]) continue;
            fprintf(f, "%s[%d,%d,%d]", begun++ ? "," : "", start[j], start[j + 1], v->read[start[j]]);
        }
        fputs("]}", f);
    }
    fputs("]}", f);
    arrfree(order);
}

// LycheeCluster, which the follower plays: the tree by which query head h of layer l read in the last
// step, units and clusters in the order of their scores. {} while there is none.
WEB const char *web_tree(int l, int h) {
    const Session *s = web_side[WEB_FOLLOW].side.app.s;
    const Lychee *x = s->part[0].ms;
    FILE *f = web_begin();
    if (!x->M_built || !indexed_layer(s, x, l) || !s->step) {
        fprintf(f, "{\"full_layers\":%d}", x->full_layers);
        return web_end(f);
    }
    TreeView v = tree_view_open(s, web_queries, l, h);
    const Nodes *top = &v.t->coarse;
    int *order = top->n ? by_score(&v, top, NULL, 0) : NULL;
    fprintf(f, "{\"lo\":%.4f,\"hi\":%.4f,\"sink\":%d,\"recent\":%d,\"units\":[", v.lo, v.hi, x->sink, t_idx(x));
    for (int i = 0; i < (int)arrlen(order); i++) {
        if (i) fputc(',', f);
        web_node(f, &v, top, order[i]);
        fprintf(f, "\"opened\":%d,", v.opened[order[i]]);
        web_clusters(f, &v, top->of, order[i]);
    }
    if (!top->n) {
        fputs("{\"id\":-1,\"opened\":1,", f);
        web_clusters(f, &v, NULL, 0);
    }
    fputs("]}", f);
    arrfree(order);
    tree_view_close(&v);
    return web_end(f);
}

// DiliLazyKV: the heads' scores, (L,H) each, and the rows before the recent ones that each head gets
// with the follower's options.
WEB const char *web_heads(void) {
    static const char *kind[] = { "dili", "lazy", "inf" };
    const App *a = &web_side[WEB_FOLLOW].side.app;
    Report r = { .a = &web, .o = a->o };
    char path[1100], err[512];
    int n = web.c->L * web.c->H, budget = a->s->budget;
    int window = opt_given(a->o, "obs-window") ? opt_int(a->o, "obs-window") : 16;
    int base = budget > window ? budget - window : budget, *cap = xcalloc((size_t)n, sizeof *cap);
    FILE *f = web_begin();
    fputs("{", f);
    scores_path(&r, path);
    for (int i = 0; i < 3; i++) {
        double *x = scores_load(path, kind[i], web.c->L, web.c->H, err);
        if (x) web_reals(f, kind[i], x, n);
        if (x && i == 2)
            dililazy_caps(x, web.c->L, web.c->H, base, opt_real(a->o, "dililazy-beta"), opt_real(a->o, "dililazy-eps"),
                          ALLOC_PAPER, cap);
        free(x);
    }
    web_ints(f, "caps", cap, n);
    fprintf(f, "\"window\":%d,\"base\":%d}", window, base);
    free(cap);
    return web_end(f);
}
#endif  // __EMSCRIPTEN__ or KVCOMP_NO_MAIN
