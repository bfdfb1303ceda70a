"use strict";
// From the view of a run (observe/run_state.py) to what is seen. A report holds its view; a live page asks for it.

const ASK_SECONDS = 2, MOST_SECONDS = 20, PATIENCE_SECONDS = 15;
const PHASES = ["plan", "prepare", "post", "transfer", "verify", "maps", "vote", "commit"];
const GAIN = "over the plan's horizon, compared with the placement before it, discounted by how earlier plans did";

const find = (selector) => document.querySelector(selector);
const chosen = { layer: null, expert: null }, matrices = {};
let current = null, timer = null, failures = 0;

/** A matrix as the view packs it: base64 of little-endian numbers. */
function unpack(packed) {
  if (!packed) return null;
  const raw = Uint8Array.from(atob(packed.data), (letter) => letter.charCodeAt(0)).buffer;
  const values = packed.kind === "i4" ? new Int32Array(raw) : new Float64Array(raw);
  return { values, rows: packed.shape.at(-2) ?? 1, columns: packed.shape.at(-1) };
}

function opened(view) {
  const measured = view.measured && { ...view.measured };
  const names = measured ? ["load", "rank_load", "imbalance", "imbalance_start"] : [];
  for (const name of names) measured[name] = unpack(measured[name]);
  return { ...view, measured, placement: unpack(view.placement), before: unpack(view.placement_before) };
}

/** Terms and values: [[term, key, exact value, text, more]]. */
function facts(name, rows) {
  return rows.map(([term, key, exact, text, ...more]) => {
    const told = more.map((text) => element("small", {}, text));
    const value = element("dd", { [`data-${name}`]: key, "data-exact": exact }, text, ...told);
    return element("div", {}, element("dt", {}, term), value);
  });
}

function worstLayer({ measured }) {
  const values = measured?.imbalance.values ?? [0];
  return values.indexOf(Math.max(...values));
}

function showTiles(view) {
  const { totals, measured } = view, { rebalances, pause_seconds: pause, saved_seconds: saved } = totals;
  const away = (links) => links["inside a node"] + links["between nodes"], moved = away(totals.moved_experts);
  const now = measured && mean(measured.imbalance.values), start = measured && mean(measured.imbalance_start.values);
  const layer = worstLayer(view), worst = measured?.imbalance.values[layer];
  const placed = totals.placed_replicas ? `, ${count(totals.placed_replicas)} replicas placed` : "";
  find("#numbers dl").replaceChildren(...facts("key", [
    ["imbalance", "imbalance", now, fixed(now), "max / mean rank load; 1 is perfect"],
    ["initial placement", "imbalance-start", start, fixed(start), "imbalance had no expert moved"],
    ["worst layer", "imbalance-worst", worst, fixed(worst), `layer ${layer}`],
    ["rebalances", "rebalances", rebalances, count(rebalances), `in ${count(totals.decisions)} decisions`],
    ["experts moved", "moved", moved, count(moved), `${bytes(away(totals.moved_bytes))} between ranks${placed}`],
    ["training stopped", "pause", pause, seconds(pause), "for rebalances, in all"],
    ["saved, estimated", "saved", saved, seconds(saved), view.expert_work],
  ]));
}

function showCurves({ curve, decisions }) {
  const start = { name: "initial placement", colour: css("start"), values: curve.start_mean, dashed: true };
  const measured = { name: "measured", colour: css("accent"), width: 2.5 };
  const worst = { name: "worst layer", colour: css("worst"), values: curve.worst, width: 1.5 };
  const marks = decisions.filter((row) => row.outcome === "committed").map((row) => row.step);
  lineChart(find("#imbalance .chart"), curve.step, [worst, start, { ...measured, values: curve.mean }], { marks });
  const times = [{ ...measured, values: curve.step_seconds }];
  lineChart(find("#step-time .chart"), curve.step, times, { floor: 0, timed: true });
}

/** Tokens of each rank in a layer; which: 0 now, 1 with the initial placement. */
function tokensOf(view, which, layer) {
  const { values, rows, columns } = view.measured.rank_load, at = (which * rows + layer) * columns;
  return values.subarray(at, at + columns);
}

function showHeat(view) {
  if (!view.measured) return;
  const { rows, columns } = view.measured.rank_load, maps = [["now", "current"], ["start", "initial"]];
  const ratios = maps.map((_, which) => Array.from({ length: rows }, (_, layer) => {
    const tokens = tokensOf(view, which, layer), middle = mean(tokens) || 1;
    return Float64Array.from(tokens, (value) => value / middle);
  }));
  const highest = ratios.map((layers) => Math.max(...layers.map((row) => Math.max(...row))));
  const most = Math.min(4, Math.max(1.2, ...highest));
  const onCursor = (row, column) => {
    const said = maps.map(([name], which) => {
      matrices[name].put([row, column]);
      return `${count(tokensOf(view, which, row)[column])} tokens, ${fixed(ratios[which][row][column], 2)} × the mean`;
    });
    find("#heat .readout").textContent = `layer ${row}, rank ${column}: ${said.join("; initial placement ")}`;
  };
  maps.forEach(([name, placement], which) => {
    matrices[name] ??= new Matrix(find(`#heat [data-which="${name}"]`));
    Object.assign(matrices[name], { onCursor, onPick: (row) => chooseLayer(row, true) });
    const label = `Heat map of ${rows} layers by ${columns} ranks, ${placement} placement, at most`;
    const shade = (row, column) => heat(ratios[which][row][column], most);
    const size = { rows, columns, rowName: "layer", columnName: "rank" };
    matrices[name].show({ ...size, colour: shade, label: `${label} ${fixed(highest[which], 2)} times the mean.` });
  });
  find("#heat .most").textContent = fixed(most, 1);
}

function showTotals({ totals, troubles }) {
  const { phase_seconds: spent, moved_bytes: carried, moved_experts: moved } = totals;
  const phases = [
    { name: "phase", class: "text", cell: (name) => name },
    { name: "time", cell: (name) => seconds(spent[name]) },
  ];
  find("#phases .scroll").replaceChildren(table("", phases, PHASES.filter((name) => name in spent)));
  const links = [
    { name: "link", class: "text", cell: (name) => name },
    { name: "experts", cell: (name) => count(moved[name]) },
    { name: "bytes", cell: (name) => bytes(carried[name]), exact: (name) => carried[name] },
  ];
  find("#links .scroll").replaceChildren(table("", links, Object.keys(carried)));
  const item = (row) => element("li", {}, element("b", {}, `step ${count(row.step)}, ${row.kind}`), row.text);
  const rows = troubles.toReversed().map(item);
  find("#troubles ul").replaceChildren(...(rows.length ? rows : [element("li", {}, "None.")]));
}

/** Decisions, newest first; of those in a row that stay for one kind of reason one row, with the step of the first. */
function folded(decisions) {
  const rows = [];
  for (const row of decisions.toReversed()) {
    const last = rows.at(-1), idle = row.outcome === "stay" && row.code;
    if (idle && last?.idle === idle) Object.assign(last, { first: row.step, times: last.times + 1 });
    else rows.push({ ...row, idle, first: row.step, times: 1 });
  }
  return rows;
}

function showTimeline({ decisions, totals, predictions }) {
  const change = ({ imbalance_before: before, imbalance_after: after }) => `${fixed(before)} → ${fixed(after)}`;
  const times = (row, text) => (row.times > 1 ? text : "");
  const columns = [
    { name: "step", cell: (row) => times(row, `${count(row.first)} to `) + count(row.step) },
    { name: "outcome", class: "text", cell: (row) => row.outcome + times(row, `, ${row.times} times`) },
    { name: "imbalance, predicted", cell: change },
    { name: "experts", title: "homes that moved; 0: replicas alone changed", cell: (row) => count(row.moved_experts) },
    { name: "cost, predicted", cell: (row) => seconds(row.seconds_spent) },
    { name: "pause", cell: (row) => seconds(row.pause_seconds) },
    { name: "gain, predicted", title: GAIN, cell: (row) => seconds(row.seconds_saved) },
    { name: "reason", class: "text reason", cell: (row) => row.reason.replaceAll(" -> ", "\u00a0→\u00a0") },
  ];
  find("#timeline .predictions").textContent = predictions ?? "";
  const caption = `The newest ${count(decisions.length)} of ${count(totals.decisions)}.`;
  find("#timeline .scroll").replaceChildren(table(caption, columns, folded(decisions)));
}

function chooseLayer(layer, jump = false) {
  if (!current) return;
  chosen.layer = Math.min(Math.max(0, layer), current.job.layers - 1);
  showLayer(current);
  if (!jump) return;
  find("#layer").scrollIntoView();
  find("#layer-number").focus({ preventScroll: true });
}

function showLayer(view) {
  if (!view.placement) return;
  const { job, measured, placement, before } = view, { layers, experts, ranks, slots_per_rank: slots } = job;
  chosen.layer = Math.min(chosen.layer ?? worstLayer(view), layers - 1);
  const { layer } = chosen, first = layer * placement.columns, readout = find("#layer .readout");
  find("#layer .which").textContent = layer;
  Object.assign(find("#layer-number"), { value: layer, max: layers - 1 });
  const [now, start] = ["imbalance", "imbalance_start"].map((name) => measured?.[name].values[layer]);
  const rows = [["imbalance", "imbalance", now, fixed(now)], ["initial placement", "start", start, fixed(start)]];
  find("#layer .facts").replaceChildren(...facts("fact", rows));

  const here = (row, column) => placement.values[first + column * slots + row];
  const was = (row, column) => (before ?? placement).values[first + column * slots + row];
  const kind = (row) => (row < slots - job.replica_slots ? "home" : "replica");
  const tokens = measured?.load.values.subarray(layer * experts, (layer + 1) * experts) ?? [];
  const hottest = Math.max(1, ...tokens);
  const onCursor = (row, column) => {
    const expert = here(row, column), old = was(row, column);
    const moved = old === expert ? "" : `; before the last rebalance: expert ${old}`;
    const said = expert < 0 ? "empty" : `expert ${expert} (${kind(row)}), ${count(tokens[expert])} tokens${moved}`;
    readout.textContent = `rank ${column}, slot ${row}: ${said}`;
  };
  const onPick = (row, column) => {
    const expert = here(row, column), found = [];
    chosen.expert = expert < 0 || chosen.expert === expert ? null : expert;
    for (let slot = 0; slot < placement.columns; slot += 1) {
      const name = `rank ${Math.floor(slot / slots)} (${kind(slot % slots)})`;
      if (placement.values[first + slot] === expert) found.push(name);
    }
    if (chosen.expert !== null) readout.textContent = `expert ${expert}: ${found.join(", ")}`;
    showLayer(view);
  };
  const shade = (row, column) => {
    const expert = here(row, column);
    if (expert < 0) return colour("card");
    if (chosen.expert === expert) return colour("mark");
    const plain = between(colour("low"), colour("high"), Math.sqrt((tokens[expert] ?? 0) / hottest));
    return kind(row) === "home" ? plain : between(plain, colour("good"), 0.35);
  };
  const label = `Placement of layer ${layer}: ${slots} slots on each of ${ranks} ranks.`;
  matrices.layer ??= new Matrix(find("#layer .placement"));
  Object.assign(matrices.layer, { onCursor, onPick });
  const marked = (row, column) => was(row, column) !== here(row, column);
  const size = { rows: slots, columns: ranks, rowName: "slot", columnName: "rank", tallest: 300 };
  matrices.layer.show({ ...size, colour: shade, marked, label });
  find("#layer .replicas").hidden = !job.replica_slots;
}

function show(view) {
  current = view;
  for (const part of [showTiles, showCurves, showHeat, showLayer, showTotals, showTimeline]) part(view);
  document.documentElement.dataset.version = view.version;
  const { job, starts } = view, started = new Date(job.time * 1000).toLocaleString();
  const sizes = `${job.layers} layers × ${job.experts} experts on ${job.ranks} ranks × ${job.slots_per_rank} slots`;
  find("#subtitle").textContent = `${sizes}, ${job.policy} policy`;
  const again = starts > 1 ? `, start ${starts} on this run` : "";
  find("#footer").textContent = `eplb_runtime ${job.package}; started ${started}${again}`;
}

function showStanding(kind, text) {
  const pill = find("#standing .pill");
  if (pill.textContent !== text) pill.textContent = text; // else a screen reader would say it again
  pill.dataset.kind = kind;
}

function showProgress({ step, step_seconds: took, idle_seconds: idle }) {
  const { standing, cause, epoch, placed_at: placed } = current;
  find("#progress").replaceChildren(...facts("key", [
    ["step", "step", step, count(step)],
    ["step time", "step-time", took, seconds(took)],
    ["placement", "placement", epoch, `epoch ${epoch}, of step ${count(placed)}`],
  ]));
  const silent = standing === "balancing" && idle > Math.max(PATIENCE_SECONDS, 10 * took);
  if (silent) return showStanding("silent", `no step for ${seconds(idle)}`);
  const why = cause && cause !== "closed" ? `: ${cause}` : "";
  showStanding(standing === "ended" && why ? "broken" : standing, standing + why);
}

async function ask() {
  clearTimeout(timer);
  try {
    const patience = { signal: AbortSignal.timeout(10000), cache: "no-store" };
    const answer = await fetch(`state?after=${current?.version ?? -1}`, patience);
    if (!answer.ok) throw new Error(`the server says ${answer.status}`);
    const { view, progress } = await answer.json();
    if (view) show(opened(view));
    showProgress(progress);
    failures = 0;
  } catch (error) {
    failures += 1;
    if (failures > 1) showStanding("silent", "no answer");
  }
  timer = setTimeout(ask, 1000 * Math.min(MOST_SECONDS, ASK_SECONDS * 2 ** failures));
}

function begin(told) {
  const repaint = () => {
    colours = null;
    if (current) for (const part of [showCurves, showHeat, showLayer]) part(current);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  addEventListener("resize", repaint);
  find("#layer-number").addEventListener("change", (event) => chooseLayer(event.target.valueAsNumber || 0));
  for (const button of document.querySelectorAll("[data-go]")) {
    button.addEventListener("click", () => chooseLayer((chosen.layer ?? 0) + Number(button.dataset.go)));
  }
  if (!told) return ask();
  document.title = told.title;
  show(opened(told.view));
  find("#progress").replaceChildren(...facts("key", [["steps", "steps", told.view.step, count(told.view.step)]]));
  showStanding(told.view.standing, told.view.cause === "closed" ? "finished" : told.view.standing);
}

begin(JSON.parse(document.getElementById("data")?.textContent ?? "null"));
