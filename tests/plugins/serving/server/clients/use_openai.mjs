// The npm package `openai`: chat and responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { API, JSON_LIMIT, MODEL, QUESTION, TEXT_LIMIT, USER, Weather, report } from "./weather.mjs";

const client = new OpenAI({ baseURL: API, apiKey: "any" });
const parameters = z.toJSONSchema(Weather);
const weather = { type: "function", function: { name: "get_weather", description: "Weather.", parameters } };
const chatFields = { model: MODEL, messages: [USER], max_tokens: TEXT_LIMIT };
const fields = { model: MODEL, input: QUESTION, max_output_tokens: TEXT_LIMIT };

const chat = async (more = {}) => (await client.chat.completions.create({ ...chatFields, ...more })).choices[0].message;

async function tool(stream) {
  const calls = [];
  const get_weather = (call) => { calls.push(call); return "sun"; };
  const run = { ...weather, function: { ...weather.function, function: get_weather, parse: JSON.parse } };
  const runner = client.chat.completions.runTools({ ...chatFields, stream, tools: [run] });
  const answer = await runner.finalContent();
  return [...calls, answer];
}

async function respondTool() {
  const tools = [{ type: "function", ...weather.function }];
  const first = await client.responses.create({ ...fields, tools });
  const call = first.output.find((item) => item.type === "function_call");
  const result = { type: "function_call_output", call_id: call.call_id, output: "sun" };
  const second = await client.responses.create({ ...fields, tools, input: [USER, ...first.output, result] });
  return [JSON.parse(call.arguments), second.output_text];
}

await report({
  chat: {
    text: async () => (await chat()).content,
    stream: () => client.chat.completions.stream(chatFields).finalContent(),
    reasoning: async () => (await chat()).reasoning_content,
    tool: () => tool(false),
    streamed_tool: () => tool(true),
    required: async () => {
      const message = await chat({ max_tokens: JSON_LIMIT, tools: [weather], tool_choice: "required" });
      return JSON.parse(message.tool_calls[0].function.arguments);
    },
    structured: async () => {
      const response_format = zodResponseFormat(Weather, "weather");
      const reply = await client.chat.completions.parse({ ...chatFields, max_tokens: JSON_LIMIT, response_format });
      return reply.choices[0].message.parsed;
    },
  },
  responses: {
    text: async () => (await client.responses.create(fields)).output_text,
    stream: async () => (await client.responses.stream(fields).finalResponse()).output_text,
    tool: respondTool,
    structured: async () => {
      const text = { format: zodTextFormat(Weather, "weather") };
      return (await client.responses.parse({ ...fields, max_output_tokens: JSON_LIMIT, text })).output_parsed;
    },
  },
});
