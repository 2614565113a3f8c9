// The AI SDK, which editors use, against the server: node ai.mjs URL KEY
import assert from "node:assert/strict";
import { generateText, streamText, tool, jsonSchema, stepCountIs } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const [url, apiKey] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "deltafin", baseURL: url + "/v1", apiKey, includeUsage: true })("k3-nano");
const base = { model, maxRetries: 0 };
const ask = { ...base, prompt: "What is the capital of Japan?" };
const answer = "The capital of Japan is Tokyo.", thought = "The user asks for the capital of Japan. It is Tokyo.";

const whole = await generateText(ask);
assert.equal(whole.text, answer);
assert.equal(whole.reasoningText, thought);
assert.equal(whole.finishReason, "stop");
assert.ok(whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0);

const stream = streamText(ask);
let text = "", reasoning = "";
for await (const part of stream.fullStream) {
  if (part.type === "text-delta") text += part.text;
  if (part.type === "reasoning-delta") reasoning += part.text;
  if (part.type === "error") throw part.error;
}
assert.equal(text, answer);
assert.equal(reasoning, thought);
assert.ok((await stream.usage).totalTokens > 0);

// A tool is called, and its result goes back with the thoughts.
const weather = tool({
  description: "Get the current weather for a city.",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
  execute: async ({ city }) => `rain in ${city}`,
});
const called = await generateText({ ...base, prompt: "What is the weather in Paris?", tools: { get_weather: weather }, stopWhen: stepCountIs(2) });
assert.deepEqual(called.steps[0].toolCalls[0].input, { city: "Paris" });
assert.equal(called.steps[0].toolResults[0].output, "rain in Paris");
assert.equal(called.steps.length, 2);
const forced = await generateText({ ...base, prompt: "What is the weather in Paris?", tools: { get_weather: weather },
  toolChoice: { type: "tool", toolName: "get_weather" } });
assert.deepEqual(forced.toolCalls[0].input, { city: "Paris" });

const controller = new AbortController();
const story = streamText({ ...base, prompt: "Tell me a story about a fox.", abortSignal: controller.signal });
let aborted = false;
for await (const part of story.fullStream) {
  controller.abort();
  aborted ||= part.type === "abort";
}
assert.ok(aborted);
console.log("done");
