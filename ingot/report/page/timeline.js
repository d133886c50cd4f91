// The pipeline: a list of all passes by stage, and a slider through them.

import { countTags } from "./code.js";
import { button, h } from "./dom.js";
import { seconds } from "./format.js";
import { bucketName, stepName } from "./step_names.js";

const LEAST_SHOWN = 0.02; // share of the slowest pass: a shorter bar would be a dot

/** The passes in a column, grouped by the stage that they lead to. */
export function createTimeline(app) {
  const slowest = Math.max(...app.data.steps.map((step) => step.seconds ?? 0), 1e-9);
  const stops = app.data.steps.map((step, number) =>
    h(
      "button",
      { type: "button", class: "pass", "data-stage": step.stage, onclick: () => app.store.set({ step: number }) },
      h("span", { class: "pass-name" }, step.name),
      h("span", { class: "pass-counts" }, step.before === null ? null : countTags(app.programs.changes(number).counts)),
      h(
        "span",
        { class: "pass-seconds", title: `${seconds(step.seconds)} of the compile` },
        step.seconds > LEAST_SHOWN * slowest && meter(step.seconds / slowest),
      ),
    ),
  );
  const groups = [];
  app.data.steps.forEach((step, number) => {
    const title = [bucketName(step), step.stage].filter(Boolean).join(" · ");
    if (groups.at(-1)?.title !== title) groups.push({ title, stage: step.stage, items: [] });
    groups.at(-1).items.push(h("li", {}, stops[number]));
  });
  const element = h(
    "nav",
    { class: "timeline", "aria-label": "Passes" },
    groups.map(({ title, stage, items }) => [h("h3", { "data-stage": stage }, title), h("ol", {}, items)]),
  );
  const update = ({ step }) => {
    stops.forEach((stop, number) => {
      if (number === step) stop.setAttribute("aria-current", "step");
      else stop.removeAttribute("aria-current");
    });
    const { offsetTop, offsetHeight } = stops[step];
    const hidden = offsetTop < element.scrollTop || offsetTop + offsetHeight > element.scrollTop + element.clientHeight;
    if (hidden) element.scrollTop = offsetTop - element.clientHeight / 2;
  };
  return { element, update };
}

function meter(share) {
  const bar = h("span", { class: "meter" });
  bar.style.width = `${share * 100}%`;
  return bar;
}

/** The slider with a button at either end; the strip below it shows the stages, bright where a pass changed nodes. */
export function createSlider(app) {
  const last = app.data.steps.length - 1;
  const slider = h("input", { type: "range", min: 0, max: last, step: 1, "aria-label": "Pass" });
  slider.addEventListener("input", () => app.store.set({ step: Number(slider.value) }));
  const back = button("Previous pass", { class: "icon", onclick: () => move(app, -1) }, "‹");
  const on = button("Next pass", { class: "icon", onclick: () => move(app, 1) }, "›");
  const strip = app.data.steps.map((step, number) => {
    const idle = step.before !== null && !Object.values(app.programs.changes(number).counts).some(Boolean);
    return h("span", { "data-stage": step.stage, class: idle ? "idle" : null });
  });
  const track = h("div", { class: "track" }, slider, h("div", { class: "strip", "aria-hidden": "true" }, strip));
  track.style.setProperty("--passes", app.data.steps.length);
  const element = h("div", { class: "slider" }, back, track, on);
  const update = ({ step }) => {
    const shown = app.data.steps[step];
    slider.value = step;
    slider.setAttribute("aria-valuetext", `${step} of ${last}: ${stepName(shown)}, ${shown.stage}`);
    back.disabled = step === 0;
    on.disabled = step === last;
  };
  return { element, update };
}

/** Go some passes forward or back, within the list. */
export function move(app, by) {
  const { step } = app.store.state;
  app.store.set({ step: Math.min(app.data.steps.length - 1, Math.max(0, step + by)) });
}
