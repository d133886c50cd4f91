// Light or dark: the system's setting, until the reader chooses.

const KEY = "ingot-theme";

/** A browser may store nothing for a local file; then the choice lasts as long as the page is open. */
function stored(action) {
  try {
    return action(localStorage);
  } catch {
    return null;
  }
}

/** Make `control` switch between the two. */
export function startTheme(control) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = stored((storage) => storage.getItem(KEY));
  const show = () => {
    const dark = chosen ? chosen === "dark" : system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    control.setAttribute("aria-pressed", String(dark));
  };
  control.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    stored((storage) => storage.setItem(KEY, chosen));
    show();
  });
  system.addEventListener("change", show);
  show();
}
