// The conversation as code: the same request with curl and with three client libraries.

const FORMATS = { curl: curl, "Python (OpenAI)": python, "Python (Anthropic)": anthropic, "Python (Ollama)": ollama };
export const SAMPLE_NAMES = Object.keys(FORMATS);

/** `body`: the request that the page sends to /v1/chat/completions. */
export function codeSample(name, body, origin, hasKey) {
  const { stream, stream_options: _, ...plain } = body;
  return FORMATS[name](plain, origin, hasKey);
}

function curl(body, origin, hasKey) {
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${origin}/v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'\n`;
}

function python(body, origin, hasKey) {
  return `import os

from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=${keyCode(hasKey)})
reply = client.chat.completions.create(
${keywords(body)}
)
print(reply.choices[0].message)
`;
}

function anthropic(body, origin, hasKey) {
  const { system, messages } = anthropicMessages(body.messages);
  const call = { model: body.model, max_tokens: body.max_tokens || 4096, ...(system ? { system } : {}), messages };
  const extra = {}; // parameters without an argument in newer versions of the library
  for (const name of ["temperature", "top_p"]) if (body[name] !== undefined) extra[name] = Math.min(body[name], 1);
  if (body.tools) call.tools = body.tools.map(({ function: tool }) => ({ name: tool.name, description: tool.description || "", input_schema: tool.parameters || { type: "object" } }));
  if (body.response_format) call.output_config = { format: { type: "json_schema", schema: body.response_format.json_schema.schema } };
  if (Object.keys(extra).length) call.extra_body = extra;
  return `import os

from anthropic import Anthropic

client = Anthropic(base_url="${origin}", api_key=${keyCode(hasKey)})
message = client.messages.create(
${keywords(call)}
)
print(message.content)
`;
}

function anthropicMessages(chatMessages) {
  const system = chatMessages.filter((one) => one.role === "system").map((one) => one.content).join("\n");
  const messages = [];
  for (const one of chatMessages.filter((message) => message.role !== "system")) {
    const role = one.role === "assistant" ? "assistant" : "user";
    const content = anthropicContent(one);
    const last = messages[messages.length - 1];
    if (last?.role === role && Array.isArray(last.content) && Array.isArray(content)) last.content.push(...content); // all tool results are one message
    else messages.push({ role, content });
  }
  return { system, messages };
}

function anthropicContent(message) {
  if (message.role === "tool") return [{ type: "tool_result", tool_use_id: message.tool_call_id, content: message.content }];
  const text = message.content ? [{ type: "text", text: message.content }] : [];
  if (message.tool_calls) return [...text, ...message.tool_calls.map((call) => ({ type: "tool_use", id: call.id, name: call.function.name, input: JSON.parse(call.function.arguments) }))];
  if (!Array.isArray(message.content)) return message.content;
  return message.content.map((part) => (part.type === "text" ? part : anthropicImage(part.image_url.url)));
}

function anthropicImage(url) {
  const [, kind, data] = url.match(/^data:([^;]+);base64,(.*)$/);
  return { type: "image", source: { type: "base64", media_type: kind, data } };
}

function ollama(body, origin, hasKey) {
  const options = {};
  const names = { temperature: "temperature", top_p: "top_p", seed: "seed", max_tokens: "num_predict" };
  for (const [name, option] of Object.entries(names)) if (body[name] !== undefined) options[option] = body[name];
  const call = { model: body.model, messages: body.messages.map(ollamaMessage) };
  if (body.tools) call.tools = body.tools;
  if (body.response_format) call.format = body.response_format.json_schema.schema;
  if (body.reasoning_effort) call.think = body.reasoning_effort === "none" ? false : body.reasoning_effort;
  if (Object.keys(options).length) call.options = options;
  const headers = hasKey ? `, headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}` : "";
  return `import os

from ollama import Client

client = Client(host="${origin}"${headers})
reply = client.chat(
${keywords(call)}
)
print(reply.message)
`;
}

function ollamaMessage(message) {
  const { reasoning_content: thinking, tool_call_id: _, tool_calls: calls, content, ...kept } = message;
  const parts = Array.isArray(content) ? content : [{ type: "text", text: content }];
  const images = parts.filter((part) => part.type === "image_url").map((part) => part.image_url.url.split(",")[1]);
  return {
    ...kept,
    content: parts.filter((part) => part.type === "text").map((part) => part.text).join("") || "",
    ...(thinking ? { thinking } : {}),
    ...(images.length ? { images } : {}),
    ...(calls ? { tool_calls: calls.map((call) => ({ function: { name: call.function.name, arguments: JSON.parse(call.function.arguments) } })) } : {}),
  };
}

// ── Python literals ──────────────────────────────────────────────────────────────────────────────────

function keyCode(hasKey) {
  return hasKey ? `os.environ["API_KEY"]` : `"unused"`;
}

function keywords(values) {
  return Object.entries(values).map(([name, value]) => `    ${name}=${literal(value, 4)},`).join("\n");
}

function literal(value, indent) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = " ".repeat(indent + 4);
  const items = Array.isArray(value) ? value.map((one) => literal(one, indent + 4)) : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, indent + 4)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const short = `${open}${items.join(", ")}${close}`;
  return short.length < 90 && !short.includes("\n") ? short : `${open}\n${items.map((one) => `${inner}${one},\n`).join("")}${" ".repeat(indent)}${close}`;
}
