// Vercel's AI SDK, whose schemas are strict about what a server answers: node ai_sdk.mjs URL. Prints one JSON object.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

const url = process.argv[2];
const key = { apiKey: "unused" };
const compatible = { name: "tokenmill", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true };
const models = {
  anthropic: createAnthropic({ baseURL: `${url}/v1`, ...key })("scripted"),
  openai: createOpenAICompatible({ ...compatible, ...key })("scripted"),
  responses: createOpenAI({ baseURL: `${url}/v1`, ...key })("scripted"),
  ollama: createOllama({ baseURL: `${url}/api` })("scripted"),
};
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `22 degrees in ${city}`,
});
const thinks = { openai: { forceReasoning: true, reasoningSummary: "auto" } }; // its way to see what was thought
const shared = { maxRetries: 0, maxOutputTokens: 2000, providerOptions: thinks };
const said = {};
for (const [name, model] of Object.entries(models)) {
  const text = await generateText({ model, prompt: "Say hello", ...shared });
  const stream = streamText({
    model,
    prompt: "What is the weather in Zürich?",
    tools: { weather },
    stopWhen: stepCountIs(3),
    onError: ({ error }) => {
      throw error;
    },
    ...shared,
  });
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  const steps = await stream.steps;
  const shaped = await generateText({
    model,
    prompt: "Which city, as JSON?",
    output: Output.object({ schema: z.object({ city: z.string() }) }),
    ...shared,
  });
  said[name] = {
    text: text.text,
    finish: text.finishReason,
    tokens: text.usage.inputTokens,
    calls: steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input])),
    streamed,
    thought: steps.at(-1).reasoningText,
    shaped: shaped.output,
  };
}
console.log(JSON.stringify(said));
