// Where compiling spent its time, and what starting takes.

import { stackedBar } from "./bars.js";
import { h } from "./dom.js";
import { plural, seconds, stepName } from "./format.js";

const EXE_SHOWN = 12; // hexadecimal digits of an executable's id: enough to tell a few thousand apart

export function timeView(app) {
  const { phases, executables, cached, start_up } = app.data.times;
  const passes = app.data.steps.filter((step) => step.seconds !== null).map((step) => [stepName(step), step.seconds, ""]);
  const built = Object.entries(executables).filter(([id]) => !cached.includes(id));
  const parts = (times) => Object.entries(times).map(([name, value]) => [name, value, ""]);
  const sections = [
    bar("Compile, by phase", parts(phases)),
    bar("Passes", passes),
    bar(
      "Executables built",
      built.map(([id, value]) => [id.slice(0, EXE_SHOWN), value, ""]),
      `built side by side: the sum is longer than the wait${cached.length ? `; ${plural(cached.length, "executable")} came from the cache` : ""}`,
    ),
    bar("Start-up", parts(start_up)),
  ];
  return h("div", { class: "columns" }, sections);
}

function bar(title, parts, note) {
  if (!parts.length) return empty(title);
  return h("div", { class: "panel" }, stackedBar(title, parts, seconds), note && h("p", { class: "quiet" }, note));
}

function empty(title) {
  return h("div", { class: "panel" }, h("h3", {}, title), h("p", { class: "quiet" }, "not recorded in this artifact"));
}
