// Models by Ollama's own JavaScript client: pull with progress, create, copy, list, show, delete.
import { Ollama } from "ollama";

const [url, served, pulled] = process.argv.slice(2);
const client = new Ollama({ host: url });
const names = async () => (await client.list()).models.map((one) => one.model).sort();
const steps = [];
for await (const part of await client.pull({ model: pulled, stream: true })) {
  steps.push([part.status, part.completed ?? null, part.total ?? null]);
}
const created = await client.create({ model: "mario", from: served, system: "You are Mario.", parameters: { temperature: 0.25 } });
const copied = await client.copy({ source: "mario", destination: "luigi" });
const shown = await client.show({ model: "luigi" });
const before = await names();
for (const model of ["mario", "luigi", pulled]) await client.delete({ model });
const refused = await client.show({ model: "mario" }).catch((error) => [error.status_code, error.message]);
const told = { steps, created: created.status, copied: copied.status, system: shown.system, before, after: await names(), refused };
console.log(JSON.stringify(told));
