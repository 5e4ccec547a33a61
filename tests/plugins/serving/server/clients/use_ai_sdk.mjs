// The AI SDK with its provider for compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { API, JSON_LIMIT, MODEL, QUESTION, TEXT_LIMIT, Weather, report } from "./weather.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const model = createOpenAICompatible({ name: "axlearn", baseURL: API, apiKey: "any", supportsStructuredOutputs: true })(MODEL);
const fields = { model, prompt: QUESTION, maxOutputTokens: TEXT_LIMIT };
let calls = [];
const get_weather = tool({
  description: "Weather.",
  inputSchema: Weather,
  execute: async (call) => { calls.push(call); return "sun"; },
});

async function streamed(more = {}) {
  const result = streamText({ ...fields, ...more });
  let text = "";
  for await (const piece of result.fullStream) {
    if (piece.type === "error") throw piece.error;
    if (piece.type === "text-delta") text += piece.text;
  }
  return { text, last: await result.text };
}

async function calling(ask) {
  calls = [];
  const answer = await ask({ tools: { get_weather }, stopWhen: stepCountIs(3) });
  return [...calls, answer];
}

await report({
  chat: {
    text: async () => (await generateText(fields)).text,
    stream: async () => (await streamed()).text,
    reasoning: async () => (await generateText(fields)).reasoningText,
    tool: () => calling(async (more) => (await generateText({ ...fields, ...more })).text),
    streamed_tool: () => calling(async (more) => (await streamed(more)).last),
    required: async () => {
      const more = { maxOutputTokens: JSON_LIMIT, tools: { get_weather }, toolChoice: "required" };
      return (await generateText({ ...fields, ...more })).toolCalls[0].input;
    },
    structured: async () => (await generateObject({ ...fields, maxOutputTokens: JSON_LIMIT, schema: Weather })).object,
  },
  output: {
    structured: async () => {
      const output = Output.object({ schema: Weather });
      return (await generateText({ ...fields, maxOutputTokens: JSON_LIMIT, output })).output;
    },
  },
});
