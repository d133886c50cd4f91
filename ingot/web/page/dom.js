// Make elements. Text becomes only text nodes and attributes, so no string of an artifact can become markup.

function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** An HTML element: `onclick` and similar attributes are listeners; false and null omit an attribute or a child. */
export function h(tag, attributes = {}, ...children) {
  return make(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return make(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** A button that does one thing. */
export function button(label, attributes, ...children) {
  return h("button", { type: "button", "aria-label": label, title: label, ...attributes }, ...children);
}
