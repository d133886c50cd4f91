// The state of the view: one frozen object, replaced as a whole, and its listeners.

export class Store {
  #listeners = [];

  constructor(state) {
    this.state = Object.freeze(state);
  }

  /** Replace some fields; listeners receive the new and the old state if anything differs. */
  set(fields) {
    const old = this.state;
    if (Object.entries(fields).every(([name, value]) => Object.is(old[name], value))) return;
    this.state = Object.freeze({ ...old, ...fields });
    for (const listener of this.#listeners) listener(this.state, old);
  }

  subscribe(listener) {
    this.#listeners.push(listener);
  }
}

/** The part of the state that the address keeps, so that a place in a report can be linked to. */
export function fromHash(hash) {
  const given = new URLSearchParams(hash.slice(1));
  const step = Number(given.get("pass") ?? NaN);
  return { tab: given.get("tab"), step: Number.isInteger(step) ? step : null, node: given.get("node") };
}

export function toHash({ tab, step, node }) {
  const kept = new URLSearchParams({ tab, pass: step });
  if (node) kept.set("node", node);
  return `#${kept}`;
}
