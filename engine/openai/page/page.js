"use strict";
// The page talks to the same API as any client: /v1/chat/completions for the chat and
// /events for the view of the machine. Whatever the model says is put in as text.

const $ = id => document.getElementById(id);
const sleep = ms => new Promise(done => setTimeout(done, ms));
const keyName = "deltafin-key";

const turns = []; // the conversation, as the API takes it
let stopper = null; // ends the answer under way
const keyGiven = []; // who waits for a key

// call is fetch with the key, and with the server's own words for an error.
async function call(path, options = {}) {
  const key = sessionStorage.getItem(keyName);
  const headers = { ...options.headers, ...(key ? { Authorization: "Bearer " + key } : {}) };
  let r;
  try {
    r = await fetch(path, { ...options, headers });
  } catch (err) {
    if (err.name === "AbortError") throw err;
    throw new Error("the server does not answer");
  }
  if (r.ok) return r;
  let message = "the server answered " + r.status;
  try {
    message = (await r.json()).error.message;
  } catch {} // not in the API's form: the status has to do
  const err = new Error(message);
  err.status = r.status;
  if (r.status === 401) askForKey(key);
  throw err;
}

function askForKey(shown) {
  if (!$("key").hidden && !shown) return;
  $("key").hidden = false;
  $("key-error").textContent = shown ? "The server does not take this key." : "";
  $("send").disabled = true;
  sessionStorage.removeItem(keyName);
  $("key-value").focus();
}

$("key").addEventListener("submit", e => {
  e.preventDefault();
  sessionStorage.setItem(keyName, $("key-value").value.trim());
  $("key-value").value = "";
  $("key").hidden = true;
  $("send").disabled = false;
  $("text").focus();
  for (const done of keyGiven.splice(0)) done();
});

// events gives a stream's events, comments among them.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", type = "message", data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { type, data: data.join("\n") };
          type = "message";
          data = [];
        } else if (line.startsWith(":")) {
          yield { type: "comment", data: line.slice(1).trim() };
        } else if (line.startsWith("data: ")) {
          data.push(line.slice(6));
        } else if (line.startsWith("event: ")) {
          type = line.slice(7);
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The chat.

function make(tag, className, text = "") {
  const e = document.createElement(tag);
  e.className = className;
  e.append(document.createTextNode(text));
  return e;
}

// follow keeps the end of the conversation in view while change adds to it, unless the
// reader has gone elsewhere.
function follow(change) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

// Speaker tells screen readers an answer sentence by sentence: token by token would be
// noise.
class Speaker {
  #rest = "";
  add(text) {
    this.#rest += text;
    const end = Math.max(...[". ", "! ", "? ", ".\n", "\n", "。"].map(s => this.#rest.lastIndexOf(s) + 1));
    if (end > 0) {
      say(this.#rest.slice(0, end));
      this.#rest = this.#rest.slice(end);
    }
  }
  end(text) {
    say(this.#rest);
    say(text);
  }
}

function say(text) {
  if (!text.trim()) return;
  $("say").append(make("p", "", text.trim()));
  while ($("say").childElementCount > 20) $("say").firstChild.remove();
}

function showAnswer() {
  const turn = make("article", "turn assistant busy");
  turn.setAttribute("aria-label", "Answer");
  const thinking = make("details", "thinking");
  const summary = make("summary", "", "Thinking");
  const thoughts = make("div", "text");
  const text = make("div", "text");
  const note = make("p", "note", "sent");
  thinking.append(summary, thoughts);
  thinking.hidden = true;
  turn.append(thinking, text, note);
  $("log").append(turn);
  return { turn, thinking, summary, thoughts, text, note };
}

function setBusy(controller) {
  stopper = controller;
  const moved = document.activeElement === $("stop") || document.activeElement === $("send");
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  if (moved) $("text").focus();
}

function seconds(since) {
  const s = (Date.now() - since) / 1000;
  return s < 0.1 ? "under 0.1 s" : s.toFixed(s < 10 ? 1 : 0) + " s";
}

async function ask(text) {
  const controller = new AbortController();
  const asked = { role: "user", content: text };
  const request = {
    messages: [...turns, asked], stream: true, stream_options: { include_usage: true }, reasoning_effort: $("effort").value,
  };
  $("empty").hidden = true;
  const question = make("article", "turn user");
  question.setAttribute("aria-label", "You");
  question.append(make("div", "text", text));
  $("log").append(question);
  const a = showAnswer();
  $("log").scrollTop = $("log").scrollHeight;
  setBusy(controller);
  const speaker = new Speaker(), began = Date.now();
  let content = "", reasoning = "", thoughtFrom = 0, thought = "", finish = "", error = "", usage = null;

  try {
    const r = await call("/v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request), signal: controller.signal,
    });
    for await (const e of events(r.body)) {
      if (e.type === "comment") {
        if (!content && !reasoning) a.note.textContent = e.data;
        continue;
      }
      if (e.data === "[DONE]") break;
      const chunk = JSON.parse(e.data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      const thinks = choice.delta.reasoning_content, says = choice.delta.content;
      follow(() => {
        if (thinks) {
          if (!reasoning) {
            thoughtFrom = Date.now();
            a.thinking.hidden = false;
            say("Thinking");
          }
          reasoning += thinks;
          a.thoughts.firstChild.appendData(thinks);
          a.summary.textContent = "Thinking, " + seconds(thoughtFrom);
          a.note.textContent = "thinking";
        }
        if (says) {
          if (!content && reasoning) thought = seconds(thoughtFrom);
          content += says;
          a.text.firstChild.appendData(says);
          a.note.textContent = "answering";
          speaker.add(says);
        }
      });
    }
    if (!finish) throw new Error("the connection was cut");
  } catch (err) {
    error = controller.signal.aborted ? "" : err.message;
  }

  if (!a.turn.isConnected) return; // another chat has begun
  follow(() => {
    a.turn.classList.remove("busy");
    if (reasoning) a.summary.textContent = "Thought for " + (thought || seconds(thoughtFrom));
    a.note.textContent = ending();
    a.note.classList.toggle("bad", error !== "");
  });
  speaker.end(error ? "Error: " + error : controller.signal.aborted ? "Stopped." : "The answer is complete.");
  if (content) {
    turns.push(asked, { role: "assistant", content, ...(reasoning ? { reasoning_content: reasoning } : {}) });
  } else {
    // Nothing was answered: the question is not part of the conversation, and is there to be
    // sent again.
    question.classList.add("left-out");
    a.turn.classList.add("left-out");
    if (!$("text").value) $("text").value = text;
    grow();
  }
  setBusy(null);

  function ending() {
    if (error) return error;
    if (controller.signal.aborted) return "stopped after " + seconds(began);
    const parts = [];
    if (finish === "length") parts.push("cut off: the most tokens of an answer");
    if (usage) {
      const known = usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${usage.prompt_tokens} prompt tokens` + (known ? ` (${known} known)` : ""), `${usage.completion_tokens} new`);
    }
    parts.push(seconds(began));
    return parts.join(" · ");
  }
}

function grow() {
  const t = $("text");
  t.style.height = "auto";
  t.style.height = t.scrollHeight + t.offsetHeight - t.clientHeight + "px";
}

$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", e => {
  if (e.key !== "Enter" || e.shiftKey || e.isComposing) return;
  e.preventDefault();
  $("ask").requestSubmit();
});
$("ask").addEventListener("submit", e => {
  e.preventDefault();
  const text = $("text").value;
  if (stopper || $("send").disabled || !text.trim()) return;
  $("text").value = "";
  grow();
  ask(text);
});
$("stop").addEventListener("click", () => stopper?.abort());
document.addEventListener("keydown", e => {
  if (e.key === "Escape") stopper?.abort();
});
$("new").addEventListener("click", () => {
  stopper?.abort();
  turns.length = 0;
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  $("say").replaceChildren();
  $("empty").hidden = false;
  setBusy(null);
  $("text").focus();
});

// The machine.

let now = { phase: "away" }, machine = null, heat = null;

function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  for (; n >= 999.5 && i < units.length - 1; i++) n /= 1000;
  return (i === 0 ? Math.round(n) : n.toPrecision(3)) + " " + units[i];
}

const number = n => n >= 100 ? n.toFixed(0) : n.toPrecision(3);

const phases = { idle: "ready", prompt: "reading the prompt", answer: "answering" };

function showSnapshot() {
  $("state").dataset.phase = now.phase;
  $("state").textContent = phases[now.phase];
  $("queue").textContent = now.queue;
  if (now.phase !== "idle") { // the last answer's figures stay
    $("rate").textContent = now.tokens_per_second ? number(now.tokens_per_second) : "–";
    const all = now.expert_bytes_read + now.expert_bytes_resident;
    $("resident").textContent = bytes(now.expert_bytes_resident);
    $("streamed").textContent = bytes(now.expert_bytes_read);
    $("bytes-bar").style.width = (all ? 100 * now.expert_bytes_resident / all : 0) + "%";
    $("bytes-bar").parentElement.classList.toggle("any", all > 0);
  }
  showLayers();
  showBrief();
}

function showLayers() {
  let done = 0, of = 1, text = "idle";
  if (now.phase === "prompt" && now.layers_of) {
    [done, of] = [now.layers_done, now.layers_of];
    text = `prompt of ${now.prompt_tokens} tokens: layer ${done} of ${of}`;
    if (now.layers_known) text += `, ${now.layers_known} of them known`;
    if (now.seconds_left >= 1) text += `, about ${Math.round(now.seconds_left)} s left`;
  } else if (now.phase === "prompt") {
    text = "the prompt begins";
  } else if (now.phase === "answer") {
    [done, of] = [machine ? machine.layer + 1 : 0, now.layers];
    text = `token ${now.new_tokens + 1}: layer ${done} of ${of}`;
  }
  $("layers").max = of;
  $("layers").value = done;
  $("layers-text").textContent = text;
}

function showBrief() {
  const parts = [];
  if ($("rate").textContent !== "–") parts.push($("rate").textContent + " tokens/s");
  if (machine) parts.push($("read").textContent + " " + $("read-unit").textContent);
  if (now.phase === "prompt" && now.layers_of) parts.push(`layer ${now.layers_done}/${now.layers_of}`);
  $("brief").textContent = parts.join(" · ");
}

function showMachine() {
  const total = machine.drives.reduce((sum, d) => sum + d.bytes_per_second, 0);
  const most = Math.max(1, ...machine.drives.map(d => d.bytes_per_second));
  const [value, unit] = bytes(total).split(" ");
  $("read").textContent = value;
  $("read-unit").textContent = unit + "/s";
  if (machine.drives.length) {
    $("drives").replaceChildren(...machine.drives.map(d => {
      const item = make("li", ""), line = make("div", "line"), bar = make("div", "bar"), fill = make("span", "");
      const name = make("bdi", "", d.name), box = make("span", "name");
      box.title = d.name;
      box.append(name);
      line.append(box, d.failed ? make("span", "speed failed", "failed") : make("span", "speed", bytes(d.bytes_per_second) + "/s"));
      fill.style.width = 100 * d.bytes_per_second / most + "%";
      bar.append(fill);
      item.append(line, bar, make("span", "note", bytes(d.bytes) + " since the start"));
      return item;
    }));
  }
  $("kept").textContent = `${machine.resident_experts} of ${machine.experts}, ${bytes(machine.resident_expert_bytes)}`;
  $("dense").textContent = bytes(machine.dense_bytes_resident);
  $("dense-read").textContent = bytes(machine.dense_bytes_streamed);
  $("limit").textContent = bytes(machine.memory_limit);
  showLayers();
  showBrief();
  showHeatLayer();
}

function showHeatLayer() {
  const mark = $("heat-layer");
  mark.hidden = !heat || !heat.rows || now.phase === "idle" || !machine || machine.layer < heat.first_layer;
  if (!mark.hidden) mark.style.top = 100 * (machine.layer - heat.first_layer + 0.5) / heat.rows + "%";
}

// palette gives the 256 colours between the style sheet's three.
function palette() {
  const style = getComputedStyle(document.documentElement);
  const stops = ["low", "mid", "high"].map(n => {
    const hex = style.getPropertyValue("--heat-" + n).trim();
    return [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
  });
  return Array.from({ length: 256 }, (_, v) => {
    const x = v / 255 * 2, i = Math.min(1, Math.floor(x));
    return stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * (x - i)));
  });
}

function showHeat() {
  if (!heat || !heat.rows) return;
  const cells = atob(heat.cells), canvas = $("heat"), colours = palette();
  if (canvas.width !== heat.columns || canvas.height !== heat.rows) [canvas.width, canvas.height] = [heat.columns, heat.rows];
  const image = new ImageData(heat.columns, heat.rows);
  let used = 0;
  for (let i = 0; i < cells.length; i++) {
    const v = cells.charCodeAt(i);
    if (v) used++;
    image.data.set([...colours[v], 255], 4 * i);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  const last = heat.first_layer + heat.rows - 1;
  const each = heat.experts_per_cell > 1 ? `, ${heat.experts_per_cell} a cell` : "";
  $("heat-rows").textContent = `${heat.experts} experts of layers ${heat.first_layer + 1}–${last + 1}${each}`;
  canvas.setAttribute("aria-label", `Experts by layer: ${used} of ${cells.length} cells were used.`);
  showHeatLayer();
}

async function watch() {
  for (;;) {
    try {
      const r = await call("/events");
      call("/v1/models").then(r => r.json()).then(list => { $("model").textContent = list.data[0].id; }).catch(() => {});
      for await (const e of events(r.body)) {
        if (e.type === "message") {
          now = JSON.parse(e.data);
          showSnapshot();
        } else if (e.type === "machine") {
          machine = JSON.parse(e.data);
          machine.drives ??= [];
          showMachine();
        } else if (e.type === "heat") {
          heat = JSON.parse(e.data);
          showHeat();
        }
      }
      away("not connected");
    } catch (err) {
      away(err.status === 401 ? "needs a key" : err.message);
      if (err.status === 401) {
        await new Promise(done => keyGiven.push(done));
        continue;
      }
    }
    await sleep(3000);
  }
}

function away(why) {
  $("state").dataset.phase = "away";
  $("state").textContent = why;
}

const wide = matchMedia("(min-width: 52rem)");
const arrange = () => { $("live").open = wide.matches; };
wide.addEventListener("change", arrange);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showHeat);
arrange();
grow();
watch();
