"use strict";
// The head of the page: state, main numbers, what deserves attention; and what a run was made with.

const STATES = { finished: "finished", running: "running", unfinished: "ended without a summary: killed, failed, or on another machine" };

function stateBadge(run) {
  const kind = run.state.startsWith("stopped") ? "stopped" : run.state;
  return element("span", { class: `badge ${kind}` }, STATES[kind] ?? run.state);
}

// Main numbers of a run: [label, text, note].
function figures(run) {
  const { last, summary, curves } = run;
  const latest = name => curves[name]?.values.at(-1);
  const least = name => curves[name] && Math.min(...curves[name].values);
  const greatest = name => curves[name] && Math.max(...curves[name].values);
  const speed = summary.tokens_per_second_per_gpu ?? latest("tokens_per_second_per_gpu");
  const all = [
    ["steps", `${formatted(last.step ?? 0)} of ${formatted(run.max_steps)}`, ""],
    ["reward", latest("reward"), note("best", greatest("reward"))],
    ["evaluation reward", latest("eval_reward"), note("best", greatest("eval_reward"))],
    ["loss", latest("loss"), curves.reward ? "" : note("best", least("loss"))],
    ["evaluation loss", latest("eval_loss"), note("best", least("eval_loss"))],
    ["completion length", latest("completions/mean_length"), "tokens"],
    ["tokens/s/GPU", speed, isNumber(summary.tokens_per_second_per_gpu) ? "of the whole run" : "at the last step"],
    ["MFU", isNumber(summary.mfu ?? latest("mfu")) ? formatted(summary.mfu ?? latest("mfu"), "share") : undefined, ""],
    ["peak memory", greatest("memory_gib"), "GiB"],
    ["tokens", summary.tokens ?? last.tokens, ""],
    ["time", isNumber(last.elapsed) ? duration(Math.max(last.elapsed, summary.elapsed ?? 0)) : undefined, ""],
    ["left", run.state === "running" && isNumber(last.eta) ? duration(last.eta) : undefined, "estimated"],
  ];
  return all.filter(([, value]) => value !== undefined && value !== null)
    .map(([label, value, text]) => [label, typeof value === "number" ? formatted(value) : value, text]);
}

function note(word, value) {
  return isNumber(value) ? `${word} ${formatted(value)}` : "";
}

// Notices that a reader should not miss.
function notices(run) {
  const lines = [];
  for (const name of ["loss", "grad_norm", "eval_loss"]) {
    const curve = run.curves[name];
    if (curve?.gaps) {
      const steps = curve.gap_steps.join(", ") + (curve.gaps > curve.gap_steps.length ? ", ..." : "");
      lines.push(`${name} is not finite at ${curve.gaps === 1 ? "step" : `${curve.gaps} steps:`} ${steps}`);
    }
  }
  if (run.last.skipped_steps) lines.push(`${run.last.skipped_steps} updates were skipped as spikes (--loss_spike_sigma)`);
  if (run.unreadable_lines) {
    lines.push(`${run.unreadable_lines} unreadable line${run.unreadable_lines > 1 ? "s" : ""} of logging.jsonl left out: the run was writing, or was killed`);
  }
  if (!run.last.step) lines.push("No step has been logged yet.");
  return lines;
}

function overviewSection(runs, made) {
  const heads = runs.map((run, number) => element("div", { class: "head" },
    element("h1", {}, runs.length > 1 ? swatch(number) : null, run.name, " ", stateBadge(run)),
    element("p", { class: "muted" }, run.folder),
    notices(run).map(text => element("p", { class: "notice" }, runs.length > 1 ? `${run.label}: ${text}` : text))));
  const numbers = runs.length > 1 ? comparison(runs) : element("div", { class: "figures" },
    figures(runs[0]).map(([label, value, text]) => element("div", { class: "figure" },
      element("span", {}, label), element("b", {}, value), element("small", {}, text))));
  return element("section", { id: "overview" }, heads, numbers,
    element("p", { class: "muted made" }, `Written ${made}`));
}

function swatch(number) {
  const node = element("i", { class: "swatch" });
  node.style.background = `var(--series${number % COLORS})`;
  return node;
}

function comparison(runs) {
  const all = runs.map(run => Object.fromEntries(figures(run).map(([label, value, text]) => [label, [value, text]])));
  const labels = [...new Set(all.flatMap(Object.keys))];
  const cell = pair => pair ? element("span", {}, pair[0], pair[1] ? element("small", {}, ` ${pair[1]}`) : null) : "–";
  return card("", table(["", ...runs.map((run, i) => element("span", {}, swatch(i), run.label))],
    labels.map(label => [label, ...all.map(values => cell(values[label]))]), { numeric: 1 }));
}

function runSection(runs) {
  return section("run", "Run", runs.map(run => runCard(run, runs)), optionsCard(runs), runs.map(run => checkpointsCard(run, runs)));
}

function runCard(run, runs) {
  const { args } = run;
  const facts = [["Layout", args.layout], ["Device", args.device], ["Host", args.host], ["Kernels", args.kernels],
    ["Versions", args.versions && Object.entries(args.versions).map(([name, version]) => `${name} ${version}`).join(", ")]];
  const starts = run.starts.map((start, i) => element("div", { class: "start" },
    element("small", {}, start.time, i ? " (again)" : ""), element("pre", {}, start.command)));
  return card(runs.length > 1 ? run.label : "Command and machine", starts,
    table(null, facts.filter(([, value]) => value)));
}

function optionsCard(runs) {
  const names = [...new Set(runs.flatMap(run => Object.keys(run.args.options)))].sort();
  if (!names.length) return null;
  const value = (run, name) => run.args.options[name] ? shown(run.args.options[name].value) : "default";
  if (runs.length === 1) {
    const rows = names.map(name => [element("code", {}, `--${name}`), value(runs[0], name), runs[0].args.options[name].source]);
    return details(`Options that are no defaults (${names.length})`, table(["flag", "value", "from"], rows));
  }
  const differing = names.filter(name => new Set(runs.map(run => value(run, name))).size > 1);
  return card("Options that differ", differing.length
    ? table(["flag", ...runs.map(run => run.label)],
      differing.map(name => [element("code", {}, `--${name}`), ...runs.map(run => value(run, name))]))
    : element("p", { class: "muted" }, "None."));
}

function checkpointsCard(run, runs) {
  if (!run.checkpoints.length) return null;
  const names = new Set(run.checkpoints.flatMap(point => Object.keys(point.metrics)));
  // Loss and reward, or others without a slash.
  const metrics = [...names].filter(name => run.checkpoints.some(point => isNumber(point.metrics[name])))
    .sort((a, b) => a.includes("/") - b.includes("/")).slice(0, 3);
  const rows = run.checkpoints.map(point => [
    element("span", {}, point.name, point.links.map(link => element("span", { class: "badge" }, link))),
    formatted(point.step), fileSize(point.bytes), dateOf(point.time), ...metrics.map(name => formatted(point.metrics[name]))]);
  return card(runs.length > 1 ? `Checkpoints: ${run.label}` : "Checkpoints",
    table(["folder", "step", "size", "saved", ...metrics], rows, { numeric: 1 }));
}

function details(title, ...children) {
  return element("details", { class: "card" }, element("summary", {}, title), ...children);
}
