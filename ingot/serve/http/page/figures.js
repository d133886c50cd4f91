// Live figures: the server's metrics each second, while the page is visible.

import { h, svg } from "./dom.js";
import { count, seconds } from "./format.js";
import { readMetrics } from "./prometheus.js";

const EVERY_MS = 1000;
const KEPT = 61; // samples: a minute

/** A metric's increase per second between two samples. A counter that started again has increased by its value. */
function rate(name, before, after) {
  const [old, now] = [before.values.get(name) ?? 0, after.values.get(name) ?? 0];
  return ((now >= old ? now - old : now) * 1000) / Math.max(1, after.at - before.at);
}

/** The last samples of the metrics. */
class Samples {
  #samples = [];

  add(values, at) {
    this.#samples = [...this.#samples, { values, at }].slice(-KEPT);
  }

  value(name) {
    return this.#samples.at(-1).values.get(name) ?? 0;
  }

  /** A counter's increase per second, between each two samples. */
  rates(name) {
    return this.#samples.slice(1).map((sample, index) => rate(name, this.#samples[index], sample));
  }

  rate(name) {
    return this.rates(name).at(-1) ?? 0;
  }

  /** The mean of a histogram's values in the last minute, or since the start if there were none. Null: never any. */
  mean(name) {
    const [first, last] = [this.#samples[0], this.#samples.at(-1)];
    const number = rate(`${name}_count`, first, last);
    if (number > 0) return rate(`${name}_sum`, first, last) / number;
    const all = this.value(`${name}_count`);
    return all > 0 ? this.value(`${name}_sum`) / all : null;
  }
}

const percent = (value) => `${(100 * value).toFixed(1)} %`;
const perSecond = (value) => `${count(value < 100 ? Number(value.toFixed(1)) : Math.round(value))}/s`;

/** Each figure: its name, and how to read its text from the samples; the name of a counter if it has a curve. */
const FIGURES = [
  ["Generated tokens", (one) => perSecond(one.rate("vllm:generation_tokens_total")), "vllm:generation_tokens_total"],
  ["Prompt tokens", (one) => perSecond(one.rate("vllm:prompt_tokens_total")), "vllm:prompt_tokens_total"],
  ["Running", (one) => count(one.value("vllm:num_requests_running"))],
  ["Waiting", (one) => count(one.value("vllm:num_requests_waiting"))],
  ["KV cache in use", (one) => percent(one.value("vllm:kv_cache_usage_perc"))],
  [
    "Found in the prefix cache",
    (one) => {
      const looked = one.value("vllm:prefix_cache_queries_total");
      return looked ? percent(one.value("vllm:prefix_cache_hits_total") / looked) : "–";
    },
  ],
  ["First token after", (one) => seconds(one.mean("vllm:time_to_first_token_seconds"))],
  ["Each next token after", (one) => seconds(one.mean("vllm:inter_token_latency_seconds"))],
  ["Finished requests", (one) => count(one.value("vllm:request_success_total"))],
];

/** A curve of values, the highest at the top. */
function curve(values) {
  const top = Math.max(...values, 1e-9);
  const first = KEPT - 1 - values.length;
  const points = values.map((value, index) => `${first + index},${(30 * (1 - value / top)).toFixed(1)}`);
  return [
    svg("polygon", { class: "area", points: [`${first},30`, ...points, `${KEPT - 2},30`].join(" ") }),
    svg("polyline", { class: "line", points: points.join(" ") }),
  ];
}

/** Show figures in `list`, and problems in `state`. Returns a function that reads the metrics again at once. */
export function startFigures(api, list, state) {
  const samples = new Samples();
  const shown = FIGURES.map(([name, text, counter]) => {
    const value = h("dd", {}, "–");
    const box = { viewBox: `0 -1 ${KEPT - 2} 32`, preserveAspectRatio: "none" };
    const drawn = counter ? svg("svg", { class: "curve", "aria-hidden": "true", ...box }) : null;
    list.append(h("div", {}, h("dt", {}, name), value, drawn));
    return { value, drawn, text, counter };
  });
  let timer = null;
  let round = 0;

  async function read() {
    clearTimeout(timer);
    const own = (round += 1);
    let again = true;
    try {
      samples.add(readMetrics(await api.metrics()), performance.now());
      for (const { value, drawn, text, counter } of shown) {
        value.textContent = text(samples);
        drawn?.replaceChildren(...curve(samples.rates(counter)));
      }
      state.textContent = "";
    } catch (error) {
      state.textContent = error.message;
      again = error.status !== 401; // until the reader types another key
    }
    if (again && own === round && !document.hidden) timer = setTimeout(read, EVERY_MS);
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : read()));
  return read;
}
