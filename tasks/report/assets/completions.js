"use strict";
// Completions of RL with search, and replies of checkpoints side by side.

const PAGE_SIZE = 20;
const ORDERS = {
  "newest first": (a, b) => b.generation - a.generation,
  "oldest first": (a, b) => a.generation - b.generation,
  "highest reward": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  "lowest reward": (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  "longest": (a, b) => (b.length ?? 0) - (a.length ?? 0),
  "shortest": (a, b) => (a.length ?? 0) - (b.length ?? 0),
};

function completionsSection(runs) {
  const withRows = runs.filter(run => run.completions.rows.length);
  if (!withRows.length) return null;
  return section("completions", "Completions", withRows.map(run => browser(run, runs.length > 1)));
}

function browser(run, isComparison) {
  const { rows, total } = run.completions;
  const reasons = [...new Set(rows.map(row => row.finish_reason).filter(Boolean))];
  const search = element("input", { type: "search", placeholder: "Search prompts and completions", class: "search" });
  const order = element("select", {}, Object.keys(ORDERS).map(name => element("option", { value: name }, name)));
  const ending = element("select", {}, ["any end", ...reasons].map(name => element("option", { value: name }, name)));
  const least = element("input", { type: "number", step: "any", placeholder: "reward from" });
  const most = element("input", { type: "number", step: "any", placeholder: "to" });
  const count = element("small", { class: "muted" });
  const list = element("div", { class: "samples" });
  const more = element("button", { type: "button" }, "More");
  const prompt = element("button", { type: "button", class: "on", hidden: true, title: "Show all prompts" });
  const state = { shown: PAGE_SIZE, prompt: null };

  function matches(row) {
    if (state.prompt !== null && row.prompt !== state.prompt) return false;
    if (ending.value !== "any end" && row.finish_reason !== ending.value) return false;
    if (least.value !== "" && !(row.reward >= Number(least.value))) return false;
    if (most.value !== "" && !(isNumber(row.reward) && row.reward <= Number(most.value))) return false;
    const words = search.value.toLowerCase();
    return !words || row.completion.toLowerCase().includes(words) || row.prompt.toLowerCase().includes(words);
  }

  function draw() {
    const found = rows.filter(matches).sort(ORDERS[order.value]);
    const file = total === null ? "a large completions.jsonl" : `${formatted(total)} in completions.jsonl`;
    count.textContent = rows.length === total ? `${formatted(found.length)} of ${formatted(rows.length)}`
      : `${formatted(found.length)} of ${formatted(rows.length)} in this page, spread evenly over ${file}`;
    list.replaceChildren(...found.slice(0, state.shown).map(row => sample(row, search.value, onlyPrompt)));
    more.hidden = found.length <= state.shown;
    prompt.hidden = state.prompt === null;
    prompt.textContent = `Prompt: ${(state.prompt ?? "").slice(0, 60)} ✕`;
  }

  function onlyPrompt(text) {
    state.prompt = text;
    order.value = "oldest first";
    restart();
  }

  function restart() {
    state.shown = PAGE_SIZE;
    draw();
  }

  for (const control of [search, order, ending, least, most]) control.addEventListener("input", restart);
  more.onclick = () => { state.shown += 2 * PAGE_SIZE; draw(); };
  prompt.onclick = () => { state.prompt = null; restart(); };
  draw();
  return card(isComparison ? run.label : "", element("div", { class: "filters" }, search, order, ending, least, most, prompt, count),
    list, more);
}

function sample(row, words, onlyPrompt) {
  const rewards = Object.entries(row.rewards ?? {}).map(([name, value]) => `${name} ${formatted(value)}`).join(", ");
  const facts = [
    `batch ${row.generation}`,
    isNumber(row.advantage) ? `advantage ${formatted(row.advantage)}` : "",
    isNumber(row.length) ? `${formatted(row.length)} tokens` : "",
    row.finish_reason && row.finish_reason !== "stop" ? `ended by ${row.finish_reason}` : "",
    Object.keys(row.rewards ?? {}).length > 1 ? rewards : "",
  ];
  const same = element("button", { type: "button", class: "small", title: "This prompt over time", onclick: () => onlyPrompt(row.prompt) }, "over time");
  const sign = !isNumber(row.advantage) || row.advantage === 0 ? "" : row.advantage > 0 ? "good" : "bad";
  return element("article", { class: "sample" },
    element("header", {}, element("span", { class: `badge ${sign}` }, `reward ${formatted(row.reward)}`),
      facts.filter(Boolean).map(fact => element("small", {}, fact)), same),
    text("prompt", row.prompt, words), text("completion", row.completion, words));
}

// A text that a click shows whole, with the found words marked.
function text(kind, content, words) {
  const node = element("pre", { class: `${kind} clamped`, title: kind });
  node.append(...marked(content || "(empty)", words));
  node.onclick = () => { if (!String(getSelection())) node.classList.toggle("clamped"); };
  return node;
}

function marked(content, words) {
  if (!words) return [content];
  const parts = [], lower = content.toLowerCase(), searched = words.toLowerCase();
  let start = 0;
  for (let at = lower.indexOf(searched); at >= 0; at = lower.indexOf(searched, start)) {
    parts.push(content.slice(start, at), element("mark", {}, content.slice(at, at + words.length)));
    start = at + words.length;
  }
  return [...parts, content.slice(start)];
}

// Replies of `swift infer` to the same prompts, by checkpoint.
function repliesSection(runs) {
  const withReplies = runs.filter(run => run.replies.length);
  if (!withReplies.length) return null;
  return section("replies", "Replies of checkpoints", withReplies.map(run => {
    const prompts = [...new Set(run.replies.flatMap(reply => reply.rows.map(row => row.prompt)))];
    const list = element("div", { class: "samples" });
    const more = element("button", { type: "button" }, "More");
    let shownPrompts = 5;
    const draw = () => {
      list.replaceChildren(...prompts.slice(0, shownPrompts).map(prompt => repliesTo(prompt, run.replies)));
      more.hidden = prompts.length <= shownPrompts;
    };
    more.onclick = () => { shownPrompts += PAGE_SIZE; draw(); };
    draw();
    return card(runs.length > 1 ? run.label : "", list, more);
  }));
}

function repliesTo(prompt, replies) {
  const rows = replies.flatMap(reply => reply.rows.filter(row => row.prompt === prompt).slice(0, 1)
    .map(row => ({ ...row, step: reply.step })));
  const label = rows.find(row => row.label !== null)?.label;
  return element("article", { class: "sample" }, text("prompt", prompt, ""),
    label === undefined ? null : element("p", { class: "expected" }, element("small", {}, "expected"), element("pre", {}, label)),
    rows.map(row => element("div", { class: "reply" }, element("small", {}, `step ${formatted(row.step)}`,
      label === undefined ? "" : row.response.trim() === label.trim() ? " ✓" : ""), text("completion", row.response, ""))));
}
