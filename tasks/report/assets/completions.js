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
      : `${formatted(found.length)} of ${formatted(rows.length)} in this page, spread over ${file}`;
    const groups = grouped(found);
    list.replaceChildren(...groups.slice(0, state.shown).map(group => sampleGroup(group, search.value, onlyPrompt)));
    more.hidden = groups.length <= state.shown;
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

// Neighbours that answer the same prompt in the same rollout batch; equal answers once, with their number.
function grouped(rows) {
  const groups = [];
  for (const row of rows) {
    const group = groups.at(-1);
    if (group && group[0].row.generation === row.generation && group[0].row.prompt === row.prompt) {
      const equal = group.find(each => each.row.completion === row.completion && each.row.reward === row.reward);
      if (equal) equal.count++;
      else group.push({ row, count: 1 });
    } else groups.push([{ row, count: 1 }]);
  }
  return groups;
}

function sampleGroup(group, words, onlyPrompt) {
  const { row } = group[0];
  const same = element("button", { type: "button", class: "small", title: "This prompt over time", onclick: () => onlyPrompt(row.prompt) }, "over time");
  return element("article", { class: "sample" },
    element("header", {}, element("small", {}, `rollout batch ${row.generation}`), same),
    text("prompt", row.prompt, words), group.map(each => completion(each.row, each.count, words)));
}

function completion(row, count, words) {
  const rewards = Object.entries(row.rewards ?? {});
  const facts = [
    isNumber(row.advantage) ? `advantage ${formatted(row.advantage)}` : "",
    isNumber(row.length) ? `${formatted(row.length)} tokens` : "",
    row.finish_reason && row.finish_reason !== "stop" ? `ended by ${row.finish_reason}` : "",
    rewards.length > 1 ? rewards.map(([name, value]) => `${name} ${formatted(value)}`).join(", ") : "",
    count > 1 ? `× ${count}` : "",
  ];
  const sign = !isNumber(row.advantage) || row.advantage === 0 ? "" : row.advantage > 0 ? "good" : "bad";
  return element("div", { class: "reply" },
    element("div", {}, element("span", { class: `badge ${sign}` }, `reward ${formatted(row.reward)}`),
      facts.filter(Boolean).map(fact => element("small", {}, fact))),
    text("completion", row.completion, words));
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
    label === undefined ? null : element("div", { class: "reply" }, element("div", {}, element("small", {}, "expected")), text("completion", label, "")),
    rows.map(row => element("div", { class: "reply" }, element("div", {}, element("small", {}, `step ${formatted(row.step)}`),
      label === undefined ? null : row.response.trim() === label.trim() ? element("span", { class: "badge good" }, "equal") : null),
      text("completion", row.response, ""))));
}
