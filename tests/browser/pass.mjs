// One pass through the web interface in Chromium: template page, layout, a short run, help panel.
//
//   node pass.mjs SETTINGS.json     prints one JSON object with what was seen
//
// Settings: playwright (node_modules), chromium, url, pack (folder name on the server), workflow (name of the template),
// workflows (name -> UI form), sampler (node class), widgets (values for the sampler), pictures (folder), help (text of its page).

import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const settings = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
const entry = path.join(settings.playwright, "playwright-core", "index.mjs");
const { chromium } = await import(pathToFileURL(entry).href);
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync"];
const seen = { errors: [], console: [] };

async function open(browser) {
  const page = await browser.newPage({ viewport: { width: 1700, height: 1000 } });
  page.setDefaultTimeout(settings.timeout_ms);
  page.on("pageerror", (error) => seen.errors.push(String(error.stack ?? error)));
  page.on("console", (message) => {
    if (message.type() === "error") seen.console.push(`${message.text()} ${message.location().url}`);
  });
  await page.goto(settings.url);
  await page.waitForFunction(() => window.app?.graph && window.app.extensionManager);
  seen.frontend = await page.evaluate(() => window.__COMFYUI_FRONTEND_VERSION__);
  await page.evaluate(() => window.app.extensionManager.setting.set("Comfy.Minimap.Visible", false));
  return page;
}

async function picture(page, name, clip) {
  await page.screenshot({ path: path.join(settings.pictures, `${name}.png`), clip });
}

// The first visit ever opens the template page by itself.
async function loadTemplate(page) {
  const pack = page.getByText(settings.pack, { exact: true }).first();
  await pack.waitFor({ timeout: 8000 }).catch(async () => {
    await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.BrowseTemplates"));
    await pack.waitFor();
  });
  await pack.click();
  const card = page.getByText(settings.workflow, { exact: true }).first();
  await card.waitFor();
  await picture(page, "templates");
  await card.click();
  await page.waitForFunction((kind) => window.app.graph._nodes.some((node) => node.type === kind), settings.sampler);
  await closeDialogs(page);
  seen.template = await layout(page);
}

async function closeDialogs(page) {
  for (let turn = 0; turn < 3; turn++) {
    await page.keyboard.press("Escape");
    await page.waitForTimeout(150);
  }
}

async function layout(page) {
  return page.evaluate(() => ({
    nodes: window.app.graph._nodes.map((node) => ({ type: node.type, title: node.title, box: [...node.getBounding()] })),
    groups: window.app.graph._groups.map((group) => ({ title: group.title, box: [...group._bounding] })),
  }));
}

async function load(page, graph) {
  await page.evaluate((data) => window.app.loadGraphData(data, true, true), graph);
  await page.waitForTimeout(300);
}

async function convertAll(page) {
  seen.workflows = {};
  for (const [name, graph] of Object.entries(settings.workflows)) {
    await load(page, graph);
    const prompt = await page.evaluate(async () => (await window.app.graphToPrompt()).output);
    seen.workflows[name] = { prompt, ...(await layout(page)) };
    await picture(page, `graph_${name}`, await fit(page));
  }
}

// Shows the whole graph; returns the part of the page that it fills.
async function fit(page) {
  const clip = await page.evaluate(() => {
    const boxes = [...window.app.graph._groups.map((group) => group._bounding), ...window.app.graph._nodes.map((n) => n.getBounding())];
    const left = Math.min(...boxes.map((b) => b[0])), top = Math.min(...boxes.map((b) => b[1]));
    const right = Math.max(...boxes.map((b) => b[0] + b[2])), bottom = Math.max(...boxes.map((b) => b[1] + b[3]));
    const canvas = window.app.canvas, room = [window.innerWidth - 110, window.innerHeight - 230];
    const scale = Math.min(room[0] / (right - left), room[1] / (bottom - top), 1);
    canvas.ds.scale = scale;
    canvas.ds.offset[0] = 80 / scale - left;
    canvas.ds.offset[1] = 140 / scale - top;
    canvas.setDirty(true, true);
    return { x: 70, y: 130, width: (right - left) * scale + 20, height: (bottom - top) * scale + 20 };
  });
  await page.waitForTimeout(700);
  return clip;
}

async function run(page) {
  await load(page, settings.workflows[settings.workflow]);
  await page.evaluate(({ kind, widgets }) => {
    const api = window.app.api, watched = (window.fastarSeen = { previews: 0, texts: [], end: null });
    for (const name of ["b_preview", "b_preview_with_metadata"]) api.addEventListener(name, () => watched.previews++);
    api.addEventListener("progress_text", (event) => watched.texts.push(event.detail.text));
    api.addEventListener("execution_success", () => (watched.end = "success"));
    api.addEventListener("execution_error", (event) => (watched.end = event.detail.exception_message));
    const node = window.app.graph._nodes.find((candidate) => candidate.type === kind);
    for (const [name, value] of Object.entries(widgets)) node.widgets.find((w) => w.name === name).value = value;
  }, { kind: settings.sampler, widgets: settings.widgets });
  await fit(page);
  await page.evaluate(() => window.app.queuePrompt(0, 1));
  await page.waitForFunction(() => window.fastarSeen.previews > 1 || window.fastarSeen.end);
  await picture(page, "running");
  await page.waitForFunction(() => window.fastarSeen.end);
  seen.run = await page.evaluate(() => window.fastarSeen);
  if (seen.run.end !== "success") return;
  await page.waitForFunction(() => [...document.querySelectorAll("video")].some((video) => video.videoWidth > 0));
  await page.waitForTimeout(1500);
  await picture(page, "finished");
  seen.leftover = await page.evaluate((kind) => {
    const node = window.app.graph._nodes.find((candidate) => candidate.type === kind);
    return node.widgets.some((widget) => widget.name === "$$canvas-image-preview");
  }, settings.sampler);
  seen.video = await page.evaluate(() => {
    const video = [...document.querySelectorAll("video")].find((candidate) => candidate.videoWidth > 0);
    return { width: video.videoWidth, height: video.videoHeight, seconds: video.duration, source: video.currentSrc };
  });
  seen.report = await page.evaluate((kind) => {
    const node = window.app.graph._nodes.find((candidate) => candidate.type === kind);
    return window.app.nodeOutputs[node.id].fastar_report[0];
  }, settings.sampler);
}

async function help(page) {
  await page.evaluate((kind) => {
    const node = window.app.graph._nodes.find((candidate) => candidate.type === kind);
    window.app.canvas.selectNode(node);
  }, settings.sampler);
  await page.locator('[data-testid="info-button"]').click();
  await page.getByText(settings.help).first().waitFor();
  await page.waitForTimeout(300);
  await picture(page, "help");
  seen.help = true;
}

const browser = await chromium.launch({ executablePath: settings.chromium, headless: true, args: FLAGS });
try {
  const page = await open(browser);
  for (const step of [loadTemplate, convertAll, run, help]) {
    seen.step = step.name;
    await step(page);
  }
  seen.step = "done";
} catch (error) {
  seen.failure = `${seen.step}: ${error.message}`;
  for (const page of browser.contexts().flatMap((context) => context.pages())) await picture(page, "failure").catch(() => {});
} finally {
  await browser.close();
}
console.log(JSON.stringify(seen));
