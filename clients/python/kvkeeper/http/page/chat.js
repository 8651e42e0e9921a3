"use strict";
// A conversation is kept in this page alone. What is said is set as text, never as HTML.

const at = (id) => document.getElementById(id);
const turns = []; // {role, content} of what was said; an answer that failed is not among them
let running = null; // of the answer that comes: what stops it
let chat = 0; // which conversation this is, so that an answer to a former one goes nowhere

function element(parent, kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  parent.append(made);
  return made;
}

function isAtEnd() {
  return at("log").scrollHeight - at("log").scrollTop - at("log").clientHeight < 60;
}

function addTurn(role, text = "") {
  at("hint").hidden = true;
  const turn = element(at("log"), "div", `turn ${role}`);
  turn.append(Object.assign(document.createElement("div"), { className: "said", textContent: text }));
  at("log").scrollTop = at("log").scrollHeight;
  return turn;
}

function headers() {
  const key = at("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

function request() {
  const system = at("system").value.trim();
  const body = { messages: [...(system ? [{ role: "system", content: system }] : []), ...turns] };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"])
    if (at(name).value !== "") body[name] = Number(at(name).value);
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + decoder.decode(part.value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function wrong(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

// Why no more of a prompt was cached.
function why(num, numCached) {
  const found = numCached
    ? `The first ${numCached} tokens of the prompt were cached: an earlier prompt had begun with the same whole blocks.`
    : "No block of the prompt was cached: no earlier prompt had begun so, or what it left has been evicted.";
  return `${found} The other ${num - numCached} were computed: new text, a last block that is not whole, or what was evicted.`;
}

class Answer {
  constructor() {
    this.turn = addTurn("assistant");
    this.turn.classList.add("running");
    this.said = this.turn.firstElementChild;
    const details = element(this.turn, "details", "figures");
    this.figures = element(details, "summary", "");
    this.why = element(details, "div", "");
    this.askedAt = performance.now();
    this.numParts = 0;
  }

  add(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) this.usage = event.usage;
    const [choice] = event.choices;
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const { content, reasoning_content: thought } = choice.delta;
    if (!content && !thought) return;
    const stays = isAtEnd();
    this.numParts += 1;
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    if (thought) this.think(thought);
    if (content) this.said.append(content);
    if (stays) at("log").scrollTop = at("log").scrollHeight;
  }

  think(text) {
    if (!this.thought) {
      const details = document.createElement("details");
      details.className = "thought";
      details.open = true;
      element(details, "summary", "", "Thought");
      this.thought = element(details, "div", "");
      this.turn.prepend(details);
    }
    this.thought.append(text);
  }

  show(isStopped) {
    const shown = [];
    const { usage, firstAt, lastAt } = this;
    const num = usage?.completion_tokens ?? this.numParts;
    if (num) shown.push(`${usage ? "" : "about "}${num} tokens`);
    if (num > 1 && lastAt > firstAt) shown.push(`${(((num - 1) * 1000) / (lastAt - firstAt)).toFixed(1)} tokens/s`);
    if (firstAt) shown.push(`first after ${Math.round(firstAt - this.askedAt)} ms`);
    if (usage) shown.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens cached`);
    if (isStopped) shown.push("stopped");
    else if (this.reason === "length") shown.push("cut: no more tokens are allowed");
    this.figures.textContent = shown.join(" \u00b7 ");
    if (usage) this.why.textContent = why(usage.prompt_tokens, usage.prompt_tokens_details?.cached_tokens ?? 0);
  }

  end() {
    this.turn.classList.remove("running");
    if (isAtEnd()) at("log").scrollTop = at("log").scrollHeight;
  }
}

async function ask(text) {
  const stopping = (running = new AbortController());
  const mine = chat;
  addTurn("user", text);
  turns.push({ role: "user", content: text });
  const answer = new Answer();
  at("send").hidden = !(at("stop").hidden = false);
  try {
    const options = { method: "POST", headers: headers(), body: JSON.stringify(request()), signal: stopping.signal };
    const response = await fetch("/v1/chat/completions", options);
    if (!response.ok) throw new Error(await wrong(response));
    for await (const event of events(response)) answer.add(event);
    if (!answer.reason) throw new Error("The answer broke off.");
    answer.show(false);
  } catch (error) {
    answer.show(stopping.signal.aborted);
    if (!stopping.signal.aborted) element(answer.turn, "div", "error", error.message).setAttribute("role", "alert");
  }
  answer.end();
  if (mine !== chat) return;
  const content = answer.said.textContent;
  if (content) turns.push({ role: "assistant", content });
  else {
    turns.pop();
    if (!at("text").value) setText(text); // to be sent again
  }
  running = null;
  at("send").hidden = !(at("stop").hidden = true);
  at("text").focus();
}

function setText(text) {
  at("text").value = text;
  at("text").style.height = "auto";
  at("text").style.height = `${at("text").scrollHeight + 2}px`;
}

function send() {
  const text = at("text").value.trim();
  if (!text || running || at("settings").querySelector(":invalid")) return;
  setText("");
  ask(text);
}

function begin() {
  running?.abort();
  running = null;
  chat += 1;
  turns.length = 0;
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  at("hint").hidden = false;
  at("send").hidden = !(at("stop").hidden = true);
  at("text").focus();
}

async function showModel() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    at("model").textContent = response.ok ? (await response.json()).data[0].id : await wrong(response);
  } catch {
    at("model").textContent = "no connection";
  }
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("text").addEventListener("input", () => setText(at("text").value));
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", begin);
at("toggle").addEventListener("click", () => {
  at("settings").hidden = !at("settings").hidden;
  at("toggle").setAttribute("aria-expanded", String(!at("settings").hidden));
});
at("key").addEventListener("change", showModel);
showModel();
