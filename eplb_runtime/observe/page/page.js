"use strict";
// The life of the page: a report shows what is inside it; a live page asks the server, again and again.

const ASK_SECONDS = 2, HIDDEN_SECONDS = 20, PATIENCE_SECONDS = 15;
let current = null, told = null, answeredAt = null, timer = null, failures = 0;

function show(view) {
  current = opened(view);
  chosen.layer = chosen.layer !== null && chosen.layer < current.job.layers ? chosen.layer : null;
  showTiles(current);
  showCurve(current);
  showStepTime(current);
  showHeat(current);
  showLayer(current);
  showLayers(current);
  showPhases(current);
  showLinks(current);
  showTroubles(current);
  showTimeline(current);
  document.documentElement.dataset.version = current.version;
  const { job } = current;
  const sizes = `${job.layers} layers × ${job.experts} experts on ${job.ranks} ranks × ${job.slots_per_rank} slots`;
  find("#subtitle").textContent = `${sizes}, ${job.policy} policy`;
  const again = current.starts > 1 ? `, start ${current.starts} on this run` : "";
  find("#footer").textContent = `eplb_runtime ${job.package}; started ${new Date(job.started * 1000).toLocaleString()}${again}`;
}

function showStanding(kind, text) {
  const pill = find("#standing .pill");
  if (pill.textContent !== text) pill.textContent = text;  // else a screen reader would say it again
  pill.dataset.kind = kind;
}

function showProgress(progress) {
  const facts = [["step", count(progress.step)], ["step time", seconds(progress.step_seconds)]];
  if (current) {
    const age = Math.max(0, progress.step - current.placed_at);
    facts.push(["placement", `epoch ${current.epoch}, ${count(age)} ${age === 1 ? "step" : "steps"} old`]);
    showStanding(...standing(progress));
  }
  const fact = ([name, text]) => element("div", name === "placement" ? { title: EPOCH } : {}, element("dt", {}, name), element("dd", { "data-key": name }, text));
  find("#progress").replaceChildren(...facts.map(fact));
}

function standing(progress) {
  const { standing: kind, cause } = current, usual = Math.max(PATIENCE_SECONDS, 10 * progress.step_seconds);
  if (kind === "ended") return cause === "closed" ? ["ended", "ended"] : ["broken", `ended: ${cause}`];
  if (kind === "paused") return ["paused", `paused: ${cause}`];
  if (kind === "suspended") return ["suspended", `suspended: ${cause}`];
  if (progress.idle_seconds > usual) return ["silent", `no step for ${seconds(progress.idle_seconds)}`];
  return ["balancing", "balancing"];
}

async function ask() {
  clearTimeout(timer);
  try {
    const patience = { signal: AbortSignal.timeout(10000), cache: "no-store" };
    const answer = await fetch(`state?after=${current?.version ?? -1}`, patience);
    if (!answer.ok) throw new Error(`the server says ${answer.status}`);
    const { view, progress } = await answer.json();
    if (view) show(view);
    showProgress(progress);
    answeredAt = Date.now();
    failures = 0;
  } catch (error) {
    failures += 1;
    const silent = answeredAt ? ` for ${seconds(Math.round((Date.now() - answeredAt) / 1000))}` : "";
    if (failures > 1) showStanding("silent", `no answer${silent}`);
  }
  const wait = document.hidden ? HIDDEN_SECONDS : Math.min(HIDDEN_SECONDS, ASK_SECONDS * 2 ** Math.min(failures, 3));
  timer = setTimeout(ask, wait * 1000);
}

function listen() {
  find("#only-rebalances").addEventListener("change", () => current && showTimeline(current));
  find("#layer-number").addEventListener("change", (event) => chooseLayer(event.target.valueAsNumber || 0));
  find("#expert-number").addEventListener("input", ({ target }) => {
    chooseExpert(Number.isNaN(target.valueAsNumber) ? null : target.valueAsNumber);
  });
  for (const button of document.querySelectorAll("[data-go]")) {
    button.addEventListener("click", () => chooseLayer((chosen.layer ?? 0) + Number(button.dataset.go)));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colours = null;
    repaint();
  });
  addEventListener("resize", repaint);
}

function repaint() {
  if (current) for (const part of [showCurve, showStepTime, showHeat, showLayer, showLinks]) part(current);
  if (told?.simulation) showSimulation(told.simulation);
}

listen();
told = JSON.parse(document.getElementById("data")?.textContent ?? "null");
if (told) {
  document.body.classList.add("report");
  if (told.title) document.title = told.title;
  if (told.view) {
    show(told.view);
    const steps = element("div", {}, element("dt", {}, "steps"), element("dd", {}, count(told.view.step)));
    find("#progress").replaceChildren(steps);
    showStanding(told.view.standing, told.view.cause === "closed" ? "finished" : told.view.standing);
  }
  if (told.simulation) {
    find("#simulation").hidden = false;
    showSimulation(told.simulation);
    showStanding("ended", "simulated");
    find("#subtitle").textContent = told.simulation.title;
  }
  if (!told.view) {
    for (const section of document.querySelectorAll('[data-needs="run"], #numbers')) section.hidden = true;
  }
} else {
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  ask();
}
