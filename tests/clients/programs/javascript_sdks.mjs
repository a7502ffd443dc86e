// The makers' own SDKs for JavaScript: node javascript_sdks.mjs URL. Prints one JSON object: for each of them the text,
// and the call and the answer of a conversation with a tool, streamed and put together by the SDK where it can.
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI from "openai";

const url = process.argv[2];
const model = "scripted";
const hello = [{ role: "user", content: "Say hello" }];
const question = [{ role: "user", content: "What is the weather in Zürich?" }];
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const said = {};

{
  const client = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
  const whole = await client.messages.create({ model, max_tokens: 500, messages: hello });
  const tools = [{ name: "weather", description: "The weather", input_schema: schema }];
  const asked = { model, max_tokens: 500, tools };
  const called = await client.messages.stream({ ...asked, messages: question }).finalMessage();
  const call = called.content.find((block) => block.type === "tool_use");
  const result = { type: "tool_result", tool_use_id: call.id, content: "22 degrees" };
  const turns = [...question, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
  const answer = await client.messages.stream({ ...asked, messages: turns }).finalMessage();
  const counted = await client.messages.countTokens({ model, messages: hello });
  said.anthropic = {
    text: whole.content[0].text,
    call: [call.name, call.input, called.stop_reason],
    answer: answer.content.at(-1).text,
    thought: answer.content[0].thinking,
    tokens: counted.input_tokens,
  };
}

{
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
  const whole = await client.chat.completions.create({ model, messages: hello });
  const tools = [{ type: "function", function: { name: "weather", description: "The weather", parameters: schema } }];
  const called = await client.chat.completions.stream({ model, messages: question, tools }).finalChatCompletion();
  const message = called.choices[0].message;
  const call = message.tool_calls[0];
  const turns = [...question, message, { role: "tool", tool_call_id: call.id, content: "22 degrees" }];
  const answer = await client.chat.completions.stream({ model, messages: turns, tools }).finalChatCompletion();
  said.openai = {
    text: whole.choices[0].message.content,
    call: [call.function.name, JSON.parse(call.function.arguments), called.choices[0].finish_reason],
    answer: answer.choices[0].message.content,
    tokens: whole.usage.prompt_tokens,
  };
}

{
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
  const whole = await client.responses.create({ model, input: "Say hello" });
  const tools = [{ type: "function", name: "weather", description: "The weather", parameters: schema }];
  const called = await client.responses.stream({ model, input: question, tools }).finalResponse();
  const call = called.output.find((item) => item.type === "function_call");
  const result = { type: "function_call_output", call_id: call.call_id, output: "22 degrees" };
  const asked = { model, input: [result], tools, previous_response_id: called.id };
  const answer = await client.responses.stream(asked).finalResponse();
  said.responses = {
    text: whole.output_text,
    call: [call.name, JSON.parse(call.arguments), called.status],
    answer: answer.output_text,
    thought: answer.output[0].content[0].text,
    tokens: whole.usage.input_tokens,
  };
}

{
  const client = new Ollama({ host: url });
  const whole = await client.chat({ model, messages: hello });
  const tools = [{ type: "function", function: { name: "weather", description: "The weather", parameters: schema } }];
  const called = await client.chat({ model, messages: question, tools });
  const call = called.message.tool_calls[0];
  const turns = [...question, called.message, { role: "tool", tool_name: "weather", content: "22 degrees" }];
  let answer = "";
  let thought = "";
  for await (const part of await client.chat({ model, messages: turns, tools, stream: true })) {
    answer += part.message.content;
    thought += part.message.thinking ?? "";
  }
  const shaped = await client.chat({ model, messages: [{ role: "user", content: "The city as JSON" }], format: schema });
  const generated = await client.generate({ model, prompt: "Say hello" });
  const listed = await client.list();
  const shown = await client.show({ model });
  const running = await client.ps();
  const vectors = await client.embed({ model, input: ["one", "two"] });
  said.library = {
    shaped: JSON.parse(shaped.message.content),
    generated: generated.response,
    listed: listed.models.map((one) => one.model),
    capabilities: shown.capabilities,
    running: running.models.map((one) => one.model),
    widths: vectors.embeddings.map((one) => one.length),
  };
  said.ollama = {
    text: whole.message.content,
    call: [call.function.name, call.function.arguments, called.done_reason],
    answer,
    thought,
    tokens: whole.prompt_eval_count,
  };
}
console.log(JSON.stringify(said));
