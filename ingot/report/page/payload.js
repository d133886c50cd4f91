// The data of the page: gzip in base64 in a script element that no browser runs.

/** The JSON value of the report. */
export async function readPayload(element) {
  const packed = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}
