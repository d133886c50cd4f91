// Assemble the page.

import { h } from "./dom.js";
import { createInspector } from "./inspector.js";
import { startKeyboard } from "./keyboard.js";
import { memoryView } from "./memory_view.js";
import { nodesView } from "./nodes_view.js";
import { createPassView } from "./pass_view.js";
import { readPayload } from "./payload.js";
import { Programs } from "./program.js";
import { createProgramView } from "./program_view.js";
import { Store, fromHash, toHash } from "./store.js";
import { stepView } from "./step_view.js";
import { createTabs } from "./tabs.js";
import { startTheme } from "./theme.js";
import { timeView } from "./time_view.js";
import { createSlider, createTimeline } from "./timeline.js";

const TABS = ["program", "time", "step", "memory", "nodes"];

/** The first pass that changed a node, which shows more than the traced program. */
function firstBusy(programs) {
  const counts = (_, number) => Object.values(programs.changes(number).counts);
  return Math.max(
    0,
    programs.steps.findIndex((...step) => counts(...step).some((count) => count > 0)),
  );
}

function createApp(data) {
  const given = fromHash(location.hash);
  const programs = new Programs(data);
  const store = new Store({
    tab: TABS.includes(given.tab) ? given.tab : "program",
    step: given.step !== null && given.step in data.steps ? given.step : firstBusy(programs),
    node: given.node,
    query: "",
  });
  const backends = [...new Set(programs.records.map((record) => record.backend))].filter(Boolean);
  return {
    data,
    programs,
    store,
    backends,
    /** Show a node; if `inStep` is the step before a removal, stay at the step that shows the removal. */
    select(key, inStep = null, go = false) {
      const { step } = store.state;
      const turn =
        inStep !== null && (go || !(programs.at(step).nodes.has(key) || programs.steps[step].before === inStep));
      store.set({ node: key, tab: "program", ...(turn ? { step: inStep } : {}) });
    },
    /** Show a value of the plan in the last program of its bucket class. */
    showValue({ entry, bucket }, name) {
      const step = data.steps.findLastIndex((one) => one.entry === entry && one.bucket === bucket);
      this.select(programs.output(step, name) ?? name, step, true);
    },
    showRegion(name) {
      const first = [...programs.at(store.state.step).nodes.values()].find(
        (node) => node.region === name && node.kind === "call",
      );
      if (first) this.select(first.key);
    },
  };
}

function programTab(app, search) {
  const ofPass = [createTimeline(app), createSlider(app), createPassView(app)];
  const ofNodes = [createProgramView(app), createInspector(app)];
  const [timeline, slider, pass] = ofPass;
  const [program, inspector] = ofNodes;
  app.program = program.element;
  const update = (state, old) => {
    const turned = state.step !== old?.step;
    if (turned) ofPass.forEach((part) => part.update(state));
    if (turned || state.query !== old.query || state.node !== old.node)
      ofNodes.forEach((part) => part.update(state, old));
    layout.classList.toggle("inspecting", state.node !== null);
  };
  app.store.subscribe(update);
  const layout = h(
    "div",
    { class: "layout" },
    timeline.element,
    h(
      "div",
      { class: "middle" },
      h("div", { class: "toolbar" }, slider.element, h("div", { class: "search" }, search, h("kbd", {}, "/"))),
      pass.element,
      program.element,
    ),
    inspector.element,
  );
  queueMicrotask(() => update(app.store.state)); // after it is in the page, because it measures positions
  return layout;
}

function searchBox(app) {
  const box = h("input", {
    type: "search",
    placeholder: "Search nodes, ops, params",
    "aria-label": "Search nodes",
    "aria-keyshortcuts": "/",
    autocomplete: "off",
    spellcheck: "false",
  });
  box.addEventListener("input", () => app.store.set({ query: box.value.trim() }));
  return box;
}

async function start() {
  startTheme(document.getElementById("theme"));
  const app = createApp(await readPayload(document.getElementById("payload")));
  const search = searchBox(app);
  const tabs = createTabs(app, [
    ["program", "Program", () => programTab(app, search)],
    ["time", "Time", timeView],
    ["step", "Step", stepView],
    ["memory", "Memory", memoryView],
    ["nodes", "Nodes", nodesView],
  ]);
  const main = document.querySelector("main");
  main.replaceChildren(...tabs.panels);
  document.querySelector("header.top").append(tabs.list);
  app.store.subscribe((state) => {
    tabs.update(state);
    history.replaceState(null, "", toHash(state));
  });
  tabs.update(app.store.state);
  startKeyboard(app, search);
  performance.mark("ready");
}

try {
  await start();
} catch (error) {
  const why = h(
    "p",
    {},
    "This page could not be shown. It needs a browser of 2024 or later. ",
    h("code", {}, String(error)),
  );
  document.querySelector("main").replaceChildren(why);
  throw error; // to the console, with its stack
}
