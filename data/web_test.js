// data/web_test.js - `make web-test`: kvcomp.html beside ./kvcomp, in node and in headless Chromium.
//   node data/web_test.js            all of it
//   node data/web_test.js NAME..     parts whose names contain a word
//
// What is not installed is left out and counted. The exit code is 1 when anything differs.
"use strict";
const fs = require("fs"), os = require("os"), path = require("path");
const { spawn, spawnSync } = require("child_process");
const { performance } = require("perf_hooks");

const page = fs.readFileSync("kvcomp.html", "utf8");
const folder = fs.mkdtempSync(path.join(os.tmpdir(), "kvcomp-web-"));
let passed = 0, failed = 0;

function check(good, what) {
    if (good) passed++;
    else failed++;
    if (!good) console.log("  FAILED: " + what);
}

// The text of one of the page's scripts.
function script(id) {
    const from = page.indexOf(">", page.indexOf('id="' + id + '"')) + 1;
    return page.slice(from, page.indexOf("</script>", from));
}

// ---- the worker in node: its functions as the page calls them, without a page

function Worker() {
    const waiting = new Map();
    const self = { events: [], heard: () => {} };
    let next = 0, receive = null;
    const post = m => {
        if (m.event) {
            self.events.push(m);
            self.heard(m);
        } else {
            waiting.get(m.id)(m);
            waiting.delete(m.id);
        }
    };
    // The last line hands out the worker's onmessage, which is a variable of this function.
    const code = script("glue") + script("worker") + "\nreturn e => onmessage(e);";
    receive = new Function("postMessage", "require", "__dirname", "__filename", "onmessage", code)(post, require, __dirname, __filename);
    self.ask = m => new Promise(done => {
        m.id = next++;
        waiting.set(m.id, done);
        receive({ data: m });
    });
    // Says a message and waits for the ends of all replies.
    self.reply = async (sides, text, most) => {
        const said = {};
        const answer = await self.ask({ cmd: "say", sides, text, most, held: false });
        let left = answer.states.length;
        for (const s of answer.states) said[s.side] = "";
        if (!left) return { said, answer };
        await new Promise(done => {
            self.heard = m => {
                if (m.event === "dead") throw new Error(m.why);
                said[m.side] += m.piece;
                if (!m.more && --left === 0) done();
            };
        });
        return { said, answer };
    };
    return self;
}

// ---- what the program says to the same dialogue

// One turn: the reply, the rows held, and the rows read in the last step.
function programTurn(session, args, text, set) {
    const env = { ...process.env };
    if (set) env.KVCOMP_SIMD = set;
    const run = spawnSync("./kvcomp", ["-t", "1", "--temp", "0", "-n", "64", "-q", "--session", session, "--json", "--json-rows",
                                       ...args, "-p", text], { encoding: "utf8", env, maxBuffer: 1 << 26 });
    if (run.status) throw new Error("./kvcomp " + args.join(" ") + ": " + run.stderr);
    return JSON.parse(run.stdout);
}

const dialogue = [
    "My name is Anna.",
    "I live in Oslo.",
    "Please read: A tired train stood behind the station. There is a wind near the street. The number of the blue " +
        "box is 795. It rained on the fence all day. From the window you can see the star.",
    "My password is 4821.",
    "Tell me a joke.",
    "<b>Is</b> this & that <script>alert(1)<\/script> text? \u{1f98a} \u00e9",
    "What is my password?",
    "What is the number of the blue box?",
];

// The options of a method that show something in a short dialogue, as lines of "name=value".
function optionsOf(info, method, budget) {
    const first = method.split("-")[0];
    return ["budget=" + budget, ...info.values.filter(v => v.startsWith(first + "-"))];
}

// Every method over the dialogue, with the values for short dialogues and without them: replies, rows
// held and rows read are the program's. Plain C has the same order of sums as the page, so there
// nothing may differ; with FMA a logit differs by rounding.
async function testEqual() {
    const w = Worker();
    const t0 = performance.now();
    const info = await w.ask({ cmd: "open", wasm: script("wasm") });
    console.log(`  open: ${(performance.now() - t0).toFixed(0)} ms, ${info.methods.length} methods`);
    let turns = 0, differ = 0, best = 0;
    for (const { name } of info.methods) {
        for (const short of [1, 0]) {
            const options = short ? optionsOf(info, name, 64) : [];
            if (!short && !optionsOf(info, name, 64)[1] && name !== "full") continue;
            const opened = await w.ask({ cmd: "method", side: 0, method: name, options: options.join("\n") });
            check(!opened.why, `${name}: ${opened.why}`);
            await w.ask({ cmd: "clear", side: 0 });
            for (const set of ["plain", ""]) {
                const session = path.join(folder, `${name}-${short}-${set}`);
                const args = ["--method", name, ...options.map(o => "--" + o)];
                if (set) await w.ask({ cmd: "clear", side: 0 });
                for (const text of dialogue) {
                    const theirs = programTurn(session, args, text, set);
                    if (!set) {                         // the page's turn is known already
                        const mine = w[name + short][text];
                        turns++;
                        if (mine !== theirs.text + JSON.stringify([theirs.rows, theirs.views])) differ++;
                        continue;
                    }
                    const { said } = await w.reply([0], text, 64);
                    const mine = await w.ask({ cmd: "rows", side: 0 });
                    best = Math.max(best, mine.tg_tok_s);
                    const what = `${name}${short ? "" : " (defaults)"}, "${text.slice(0, 24)}"`;
                    check(said[0] === theirs.text, `${what}: "${said[0]}", the program "${theirs.text}"`);
                    check(JSON.stringify(mine.rows) === JSON.stringify(theirs.rows), what + ": other rows are held");
                    check(JSON.stringify(mine.views) === JSON.stringify(theirs.views), what + ": other rows are read");
                    (w[name + short] ||= {})[text] = said[0] + JSON.stringify([mine.rows, mine.views]);
                }
            }
        }
    }
    check(differ === 0, `${differ} of ${turns} turns differ from the program's own instruction set`);
    console.log(`  ${turns} turns, ${differ} differ with this machine's own instruction set; ${best.toFixed(0)} tokens/s at best`);
}

// ---- headless Chromium, driven through a pipe

// Starts it and opens the page in a window of its own; { evaluate, send, close }.
async function Browser(wide, dark) {
    const program = ["chromium", "chromium-browser", "google-chrome"].find(p => spawnSync(p, ["--version"]).status === 0);
    if (!program) return null;
    const root = process.getuid && process.getuid() === 0 ? ["--no-sandbox"] : [];
    const child = spawn(program, ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
                                  "--js-flags=--expose-gc", "--user-data-dir=" + fs.mkdtempSync(path.join(folder, "chromium-")), ...root],
                        { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });
    const waiting = new Map(), self = { errors: [] };
    let next = 1, rest = "", session;
    child.stdio[4].setEncoding("utf8");
    child.stdio[4].on("data", piece => {
        const parts = (rest + piece).split("\0");
        rest = parts.pop();
        for (const m of parts.map(x => JSON.parse(x))) {
            if (m.id) waiting.get(m.id)(m);
            if (m.method === "Runtime.exceptionThrown") self.errors.push(m.params.exceptionDetails.exception?.description || m.params.exceptionDetails.text);
            if (m.method === "Log.entryAdded" && m.params.entry.level === "error") self.errors.push(m.params.entry.text);
            if (m.method === "Page.javascriptDialogOpening") self.errors.push("a dialog: " + m.params.message);
        }
    });
    self.send = (method, params = {}) => new Promise((done, fail) => {
        waiting.set(next, m => m.error ? fail(new Error(method + ": " + m.error.message)) : done(m.result));
        child.stdio[3].write(JSON.stringify({ id: next++, method, params, sessionId: session }) + "\0");
    });
    // The value of an expression in the page; a promise is waited for.
    self.evaluate = async code => {
        const r = await self.send("Runtime.evaluate", { expression: code, awaitPromise: true, returnByValue: true });
        if (r.exceptionDetails) throw new Error(r.exceptionDetails.exception?.description || r.exceptionDetails.text);
        return r.result.value;
    };
    self.key = async (key, text, modifiers = 0) => {
        await self.send("Input.dispatchKeyEvent", { type: "keyDown", key, text, modifiers, windowsVirtualKeyCode: { Tab: 9, Enter: 13, ArrowRight: 39, ArrowLeft: 37, Home: 36 }[key] });
        await self.send("Input.dispatchKeyEvent", { type: "keyUp", key });
    };
    self.picture = async name => {
        const { data } = await self.send("Page.captureScreenshot", { format: "png" });
        fs.writeFileSync(name, Buffer.from(data, "base64"));
    };
    self.close = () => {
        child.stdio[3].end();
        child.kill();
    };
    const { targetId } = await self.send("Target.createTarget", { url: "about:blank" });
    session = (await self.send("Target.attachToTarget", { targetId, flatten: true })).sessionId;
    for (const domain of ["Page", "Runtime", "Log"]) await self.send(domain + ".enable");
    await self.send("Emulation.setDeviceMetricsOverride", { width: wide, height: wide > 600 ? 1000 : 800, deviceScaleFactor: 1, mobile: wide < 600 });
    await self.send("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: dark ? "dark" : "light" }] });
    const t0 = performance.now();
    await self.send("Page.navigate", { url: "file://" + path.resolve("kvcomp.html") });
    await self.evaluate(`new Promise(done => { const look = () => document.documentElement?.dataset.ready ? done() : setTimeout(look, 5); look(); })`);
    self.opened = performance.now() - t0;
    return self;
}

const tests = [
    ["equal", "replies, rows held and rows read are the program's, for every method", testEqual],
];

async function main() {
    const words = process.argv.slice(2);
    for (const [name, what, test] of tests) {
        if (words.length && !words.some(w => name.includes(w))) continue;
        console.log(`${name}: ${what}`);
        await test();
    }
    fs.rmSync(folder, { recursive: true });
    console.log(`${passed} passed, ${failed} failed`);
    process.exit(failed ? 1 : 0);
}
main().catch(e => {
    console.log(e.stack);
    process.exit(1);
});
