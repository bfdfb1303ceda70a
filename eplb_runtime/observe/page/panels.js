"use strict";
// Panels: from the view that the server gives (observe/view.py) to what is seen. Nothing here talks to the server.

const chosen = { layer: null, expert: null };
const find = (selector) => document.querySelector(selector);

/** A matrix as the view packs it: base64 of little-endian numbers. */
function unpack(packed) {
  if (!packed) return null;
  const raw = Uint8Array.from(atob(packed.data), (letter) => letter.charCodeAt(0)).buffer;
  const values = packed.kind === "i4" ? new Int32Array(raw) : new Float64Array(raw);
  return { values, shape: packed.shape, rows: packed.shape.at(-2) ?? 1, columns: packed.shape.at(-1) };
}

/** The view with its matrices unpacked. */
function opened(view) {
  const measured = view.measured && {
    ...view.measured,
    load: unpack(view.measured.load),
    ranks: unpack(view.measured.rank_load),
    imbalance: unpack(view.measured.imbalance),
    start: unpack(view.measured.imbalance_start),
  };
  const byLayer = view.planned && unpack(view.planned.by_layer);
  const placement = unpack(view.placement), before = unpack(view.placement_before);
  const traffic = view.traffic && { ...view.traffic, bytes: unpack(view.traffic.bytes) };
  return { ...view, measured, byLayer, placement, before, traffic };
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);

// -- tiles -----------------------------------------------------------------------------------------------------------

function showTiles(view) {
  const { totals, measured } = view;
  const away = (links) => links["inside a node"] + links["between nodes"];
  const now = measured && mean(measured.imbalance.values), start = measured && mean(measured.start.values);
  const worst = measured && Math.max(...measured.imbalance.values);
  const moved = away(totals.moved_experts), pause = totals.pause_seconds, saved = totals.saved_seconds;
  const placed = totals.placed_replicas;
  const tiles = [
    ["imbalance now", "imbalance", now, fixed(now), "max / mean rank load"],
    ["without rebalancing", "imbalance-start", start, fixed(start), "experts where they started"],
    ["worst layer", "imbalance-worst", worst, fixed(worst), measured ? `layer ${worstLayers(view)[0]}` : "–"],
    ["rebalances", "rebalances", totals.rebalances, count(totals.rebalances), `of ${count(totals.decisions)} decisions`],
    ["experts moved", "moved", moved, count(moved), `${bytes(away(totals.moved_bytes))} between ranks${placed ? `, ${count(placed)} replicas placed` : ""}`],
    ["training stood still", "pause", pause, seconds(pause), "for rebalances, in all"],
    ["saved, estimated", "saved", saved, seconds(saved), `${seconds(saved - pause)} after pauses`],
  ];
  const tile = ([name, key, exact, text, told]) => {
    const value = element("dd", { "data-key": key, "data-exact": exact ?? "" }, text, element("small", {}, told));
    return element("div", {}, element("dt", {}, name), value);
  };
  find("#numbers dl").replaceChildren(...tiles.map(tile));
}

function worstLayers(view) {
  const { values } = view.measured.imbalance;
  return Array.from(values.keys()).sort((a, b) => values[b] - values[a] || a - b);
}

// -- heat maps -------------------------------------------------------------------------------------------------------

const heatMaps = {};

function tokensOf(view, which, layer) {
  const { ranks } = view.measured, at = (which * ranks.rows + layer) * ranks.columns;
  return ranks.values.subarray(at, at + ranks.columns);
}

function showHeat(view) {
  if (!view.measured) return;
  const { rows, columns } = view.measured.ranks, ratios = {};
  for (const [which, name] of [[0, "now"], [1, "start"]]) {
    ratios[name] = Array.from({ length: rows }, (_, layer) => {
      const tokens = tokensOf(view, which, layer), middle = mean(tokens) || 1;
      return Float64Array.from(tokens, (value) => value / middle);
    });
  }
  const highest = (rows) => Math.max(...rows.map((row) => Math.max(...row)));
  const most = Math.max(1.2, Math.min(4, Math.max(highest(ratios.start), highest(ratios.now))));
  const said = (row, column) => {
    const told = (which, name) => `${count(tokensOf(view, which, row)[column])} tokens, ${fixed(ratios[name][row][column], 2)} × the mean`;
    return `layer ${row}, rank ${column}: ${told(0, "now")}; as experts stood at the start ${told(1, "start")}`;
  };
  const move = (row, column) => {
    for (const map of Object.values(heatMaps)) map.put([row, column]);
    find("#heat .readout").textContent = said(row, column);
  };
  for (const name of ["start", "now"]) {
    heatMaps[name] ??= new Matrix(find(`#heat [data-which="${name}"]`));
    Object.assign(heatMaps[name], { onCursor: move, onPick: (row) => chooseLayer(row, true) });
    const when = name === "now" ? "as measured" : "as experts stood at the start";
    const told = `the busiest rank of a layer has ${fixed(highest(ratios[name]), 2)} times the mean`;
    heatMaps[name].show({
      rows, columns, rowName: "layer", columnName: "rank", tallest: 460,
      colour: (row, column) => heat(ratios[name][row][column], most),
      label: `Heat map of ${rows} layers by ${columns} ranks, ${when}: ${told}.`,
    });
  }
  const scale = element("i");
  scale.style.background = `linear-gradient(90deg, ${css("cold")}, ${css("even")} ${(100 / most).toFixed(0)}%, ${css("hot")})`;
  find("#heat .legend").replaceChildren("0 ×", scale, `${fixed(most, 1)} × the mean (neutral: 1 ×)`);
}

// -- one layer -------------------------------------------------------------------------------------------------------

let placementMap = null;

function chooseLayer(layer, jump = false) {
  chosen.layer = Math.min(Math.max(0, layer), (current?.job.layers ?? 1) - 1);
  if (current) showLayer(current);
  if (jump) {
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    find("#layer").scrollIntoView({ behavior: calm ? "auto" : "smooth" });
    find("#layer-number").focus({ preventScroll: true });
  }
}

function showLayer(view) {
  if (!view.placement) return;
  chosen.layer ??= view.measured ? worstLayers(view)[0] : 0;
  const { layer } = chosen, { experts, layers } = view.job;
  find("#layer .which").textContent = layer;
  Object.assign(find("#layer-number"), { value: layer, max: layers - 1 });
  find("#expert-number").max = experts - 1;
  const facts = [];
  if (view.measured) {
    facts.push(["imbalance", view.measured.imbalance.values[layer]], ["as at the start", view.measured.start.values[layer]]);
    barsOfRanks(find(".bars-of-ranks"), tokensOf(view, 0, layer), tokensOf(view, 1, layer));
  }
  if (view.byLayer) {
    facts.push(["predicted", view.byLayer.values[layers + layer]], ["lower bound", view.byLayer.values[2 * layers + layer]]);
  }
  const fact = ([name, value]) => {
    const told = element("dd", { "data-fact": name, "data-exact": value }, fixed(value));
    return element("div", {}, element("dt", {}, name), told);
  };
  find("#layer .facts").replaceChildren(...facts.map(fact));
  showPlacement(view, layer);
}

/** Who stands where in a layer: `here(slot)`, `was(slot)` before the last rebalance, `slotsOf(expert)`. */
function placementOf(view, layer) {
  const { values, columns } = view.placement, first = layer * columns, slots = new Map();
  const here = (slot) => values[first + slot], was = (slot) => (view.before ? view.before.values[first + slot] : here(slot));
  for (let slot = 0; slot < columns; slot += 1) {
    if (here(slot) >= 0) slots.set(here(slot), [...(slots.get(here(slot)) ?? []), slot]);
  }
  return { here, was, slotsOf: (expert) => slots.get(expert) ?? [] };
}

function showPlacement(view, layer) {
  const { ranks, slots_per_rank: slots, experts, replica_slots: copies } = view.job;
  const homes = slots - copies, { here, was, slotsOf } = placementOf(view, layer), slotAt = (row, column) => column * slots + row;
  const tokens = view.measured && view.measured.load.values.subarray(layer * experts, (layer + 1) * experts);
  const hottest = tokens ? Math.max(1, ...tokens) : 1;
  const described = (row, column) => {
    const slot = slotAt(row, column), expert = here(slot), at = `rank ${column}, slot ${row}`;
    if (expert < 0) return `${at}: empty`;
    const others = slotsOf(expert).filter((other) => other !== slot).map((other) => Math.floor(other / slots));
    const parts = [`${at}: expert ${expert} (${row < homes ? "home" : "copy"})`];
    if (tokens) parts.push(`${count(tokens[expert])} tokens in all`);
    if (others.length) parts.push(`also on rank${others.length > 1 ? "s" : ""} ${others.join(", ")}`);
    if (was(slot) !== expert) parts.push(`before the last rebalance: ${was(slot) < 0 ? "nothing" : `expert ${was(slot)}`}`);
    return parts.join("; ");
  };
  placementMap ??= new Matrix(find("#layer .placement"));
  placementMap.onCursor = (row, column) => { find("#layer .readout").textContent = described(row, column); };
  placementMap.onPick = (row, column) => {
    const expert = here(slotAt(row, column));
    if (expert >= 0) chooseExpert(chosen.expert === expert ? null : expert);
  };
  const which = copies ? `; ${copies > 1 ? `the last ${copies} slots` : "the last slot"} of a rank for copies` : "";
  find(".placement-told").textContent = `where each expert is, the stronger the colour the busier${which}; a corner marks what the last rebalance brought`;
  placementMap.show({
    rows: slots, columns: ranks, rowName: "slot", columnName: "rank", tallest: 300,
    colour: (row, column) => {
      const expert = here(slotAt(row, column));
      if (expert < 0) return colour("card");
      if (chosen.expert === expert) return colour("mark");
      const shade = between(colour("low"), colour("high"), tokens ? Math.sqrt(tokens[expert] / hottest) : 0.4);
      return row < homes ? shade : between(shade, colour("good"), 0.35);
    },
    marked: (row, column) => was(slotAt(row, column)) !== here(slotAt(row, column)),
    label: `Placement of layer ${layer}: ${slots} slots on each of ${ranks} ranks.`,
  });
}

function chooseExpert(expert) {
  chosen.expert = expert;
  find("#expert-number").value = expert ?? "";
  if (!current) return;
  showLayer(current);
  if (expert === null) return;
  const { slots_per_rank: slots, replica_slots: copies } = current.job;
  const name = (slot) => `rank ${Math.floor(slot / slots)} (${slot % slots < slots - copies ? "home" : "copy"})`;
  const found = placementOf(current, chosen.layer).slotsOf(expert).map(name);
  find("#layer .readout").textContent = found.length ? `expert ${expert}: ${found.join(", ")}` : `there is no expert ${expert}`;
}

// -- the rest --------------------------------------------------------------------------------------------------------

function showLayers(view) {
  if (!view.measured) return;
  const { imbalance, start, ranks } = view.measured;
  const busiest = (layer) => {
    const tokens = tokensOf(view, 0, layer);
    return tokens.indexOf(Math.max(...tokens));
  };
  const opener = (layer) => {
    const button = element("button", { type: "button", "aria-label": `open layer ${layer}` }, String(layer));
    button.onclick = () => chooseLayer(layer, true);
    return button;
  };
  const columns = [
    { name: "layer", cell: opener },
    { name: "measured", cell: (layer) => fixed(imbalance.values[layer]), exact: (layer) => imbalance.values[layer] },
    { name: "at start", cell: (layer) => fixed(start.values[layer]), exact: (layer) => start.values[layer] },
    { name: "bound", title: BOUND, cell: (layer) => fixed(view.byLayer?.values[2 * ranks.rows + layer]) },
    { name: "busiest rank", cell: (layer) => count(busiest(layer)) },
  ];
  const worst = worstLayers(view).slice(0, 10);
  find("#layers .scroll").replaceChildren(table("Highest imbalance first; a number opens its layer.", columns, worst));
}

const PHASES = {
  plan: "rank 0 makes the plan, while training goes on",
  prepare: "memory for the experts that move here is reserved",
  post: "sends and receives are started",
  transfer: "waiting until all experts have arrived",
  verify: "checksums of what arrived are compared",
  maps: "tables that say where each expert is are made for the new placement",
  vote: "all ranks agree to take the new placement, or to leave the old one",
  commit: "arrived experts are written to their slots, and the tables change",
};
const BOUND = "no placement can get below this for the load that was forecast";
const EPOCH = "number of the placement: how often experts have moved";

function showPhases(view) {
  const order = ["plan", "prepare", "post", "transfer", "verify", "maps", "vote", "commit"];
  const spent = view.totals.phase_seconds;
  const item = (name) => ({ name, value: spent[name], text: seconds(spent[name]), title: PHASES[name] });
  bars(find("#phases .bars"), order.filter((name) => name in spent).map(item));
}

let trafficMap = null;

function showLinks(view) {
  const { moved_bytes: carried, moved_experts: moved } = view.totals;
  const item = (name) => ({ name, value: carried[name], text: `${bytes(carried[name])}, ${count(moved[name])} experts` });
  bars(find("#links .bars"), Object.keys(carried).map(item));
  const { bytes: matrix, of } = view.traffic;
  const what = "Home experts with their optimizer state, over the whole run, in one EP group.";
  find("#links .told").textContent = `${what} Rows send, columns receive, by ${of}.`;
  const most = matrix ? Math.max(1, ...matrix.values) : 1;
  if (!matrix || !matrix.columns) return;
  const at = (row, column) => matrix.values[row * matrix.columns + column];
  trafficMap ??= new Matrix(find("#links .matrix"));
  trafficMap.onCursor = (row, column) => {
    find("#links .readout").textContent = `${of} ${row} to ${of} ${column}: ${bytes(at(row, column))}`;
  };
  trafficMap.show({
    rows: matrix.rows, columns: matrix.columns, rowName: "from", columnName: "to", tallest: 320,
    colour: (row, column) => between(colour("low"), colour("high"), Math.sqrt(at(row, column) / most)),
    label: `Bytes from each ${of} to each; the busiest link carried ${bytes(most)}.`,
  });
}

function showTroubles(view) {
  const item = (trouble) => element("li", {}, element("b", {}, `step ${count(trouble.step)}, ${trouble.kind}`), trouble.text);
  const rows = [...view.troubles].reverse().map(item);
  find("#troubles ul").replaceChildren(...(rows.length ? rows : [element("li", {}, "None.")]));
}

function showTimeline(view) {
  const only = find("#only-rebalances").checked;
  const rows = view.decisions.filter((row) => !only || row.outcome !== "stay").reverse();
  const change = ({ imbalance_before: before, imbalance_after: after }) => (known(before) ? `${fixed(before)} → ${fixed(after)}` : "–");
  const columns = [
    { name: "step", cell: (row) => count(row.step) },
    { name: "outcome", class: "text", cell: (row) => row.outcome },
    { name: "imbalance, predicted", cell: change },
    { name: "bound", title: BOUND, cell: (row) => fixed(row.imbalance_bound) },
    { name: "experts", title: "homes that moved; 0: replicas alone changed", cell: (row) => count(row.moved_experts) },
    { name: "bytes", cell: (row) => bytes(row.moved_bytes) },
    { name: "cost, predicted", cell: (row) => seconds(row.seconds_spent) },
    { name: "pause", cell: (row) => seconds(row.pause_seconds) },
    { name: "gain, predicted", cell: (row) => seconds(row.seconds_saved) },
    { name: "reason", class: "text reason", cell: (row) => row.reason.replaceAll(" -> ", "\u00a0→\u00a0") },
  ];
  const caption = `${count(rows.length)} shown of ${count(view.totals.decisions)} in all, newest first.`;
  find("#timeline .predictions").textContent = view.predictions ?? "";
  find("#timeline .scroll").replaceChildren(table(caption, columns, rows));
}

function showCurve(view) {
  const { curve } = view;
  const marks = view.decisions.filter((row) => row.outcome === "committed").map((row) => row.step);
  lineChart(find("#imbalance .chart"), curve.step, [
    { name: "worst layer", colour: css("worst"), values: curve.worst, width: 1.5 },
    { name: "as experts stood at the start", colour: css("start"), values: curve.start_mean, dashed: true },
    { name: "measured", colour: css("accent"), values: curve.mean, width: 2.5 },
  ], { marks });
}

function showStepTime(view) {
  const { curve } = view;
  find("#step-time .expert-work").textContent = view.expert_work ? `Of that, ${view.expert_work}.` : "";
  const longer = curve.mean.map((now, at) => 1 + view.moe_share * (curve.start_mean[at] / Math.max(1, now) - 1));
  const without = curve.step_seconds.map((value, at) => value * longer[at]);
  lineChart(find("#step-time .chart"), curve.step, [
    { name: "without rebalancing, estimated", colour: css("start"), values: without, dashed: true },
    { name: "measured", colour: css("accent"), values: curve.step_seconds, width: 2.5 },
  ], { floor: 0, label: secondsUpTo });
}

const HUES = ["start", "mark", "accent", "good", "bad", "warn"];

function showSimulation(found) {
  find("#simulation .told").textContent = found.told;
  const length = Math.max(0, ...found.policies.map((policy) => policy.imbalance.length));
  const windows = Array.from({ length }, (_, at) => at + found.first_window);
  const line = ({ policy, imbalance }, at) => ({ name: policy, colour: css(HUES[at % HUES.length]), values: imbalance });
  lineChart(find("#simulation .chart"), windows, found.policies.map(line), { unit: "window" });
  const time = ({ policy, steps }, at) => ({ name: policy, colour: css(HUES[at % HUES.length]), values: steps });
  lineChart(find("#simulation .steps"), windows, found.policies.map(time), { floor: 0, label: secondsUpTo, unit: "window" });
  const base = found.policies[0]?.step_seconds;
  const beside = ({ step_seconds: own }) => (known(own) && known(base) ? `${fixed((100 * own) / base, 1)} %` : "–");
  const columns = [
    { name: "policy", class: "text", cell: (row) => row.policy },
    { name: "balancedness", cell: (row) => fixed(row.balancedness) },
    { name: "imbalance, mean", cell: (row) => fixed(row.mean), exact: (row) => row.mean },
    { name: "worst", cell: (row) => fixed(row.worst) },
    { name: "rebalances", cell: (row) => count(row.rebalances) },
    { name: "slots moved", cell: (row) => count(row.moved_slots) },
    { name: "bytes moved", cell: (row) => bytes(row.moved_bytes) },
    { name: "step with its moves", cell: (row) => seconds(row.step_seconds) },
    { name: "step time beside the first", cell: beside },
  ];
  const caption = "The step model compares policies; it does not predict a cluster.";
  find("#simulation .scroll").replaceChildren(table(caption, columns, found.policies));
}
