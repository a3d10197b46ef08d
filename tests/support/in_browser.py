"""Run a script in Chromium on a page of results."""

import hashlib
import json
import shutil
import subprocess
from base64 import b64encode

import patience
from report_page import Page

CHROMIUM = shutil.which("chromium")


# What a script can use, after the page's own script has run.
HELPERS = """
const all = (selector, of = document) => [...of.querySelectorAll(selector)];
const words = (element) => element.innerText.replace(/\\s+/g, " ").trim();
const waited = () => new Promise((resolve) => setTimeout(resolve, 100));
const change = (control, key, value) => {
  control[key] = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
};
const done = (found) => {
  document.title = "";
  document.body.textContent = JSON.stringify(found);
};
"""


def in_browser(answer, folder, script):
    """Return what a script passes to ``done`` in a browser that shows the page."""
    loaded = f'addEventListener("load", async () => {{ await waited(); {script} }});'
    probe = f"{{ {HELPERS} {loaded} }}"
    allowed = b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    page = folder / "page.html"
    # The policy of the page allows the probe too.
    markup = answer.read_text().replace("script-src ", f"script-src 'sha256-{allowed}' ")
    page.write_text(markup.replace("<a class", f"<script>{probe}</script><a class", 1))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000")
    command = [CHROMIUM, *options, f"--user-data-dir={folder}/profile", "--dump-dom", str(page)]
    dumped = patience.run(command, 60, stdout=subprocess.PIPE, text=True)
    assert dumped.returncode == 0
    text = Page(dumped.stdout).text
    assert text.startswith("["), text[:2000]
    return json.loads(text)
