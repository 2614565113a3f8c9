// Anthropic's own client against the server: node anthropic.mjs URL KEY
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey, maxRetries: 0 });
const base = { model: "k3-nano", max_tokens: 200, thinking: { type: "enabled", budget_tokens: 1024 } };
const user = (content) => ({ role: "user", content });
const ask = { ...base, messages: [user("What is the capital of Japan?")] };

const whole = await client.messages.create(ask);
assert.deepEqual(whole.content.map((b) => b.type), ["thinking", "text"]);
assert.equal(whole.content[1].text, "The capital of Japan is Tokyo.");
assert.equal(whole.stop_reason, "end_turn");

const streamed = await client.messages.stream(ask).finalMessage();
assert.deepEqual(streamed.content, whole.content);

const tools = [{ name: "get_weather", description: "Get the current weather for a city.",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];
const weather = { ...base, tools, messages: [user("What is the weather in Paris?")] };
const called = await client.messages.stream(weather).finalMessage();
const use = called.content.at(-1);
assert.equal(called.stop_reason, "tool_use");
assert.deepEqual(use.input, { city: "Paris" });
await client.messages.create({ ...weather, messages: [
  ...weather.messages, { role: "assistant", content: called.content },
  user([{ type: "tool_result", tool_use_id: use.id, content: "rain" }]),
] });

await assert.rejects(client.messages.create({ ...ask, model: "claude-9" }), (e) => e.status === 404);
const story = client.messages.stream({ ...base, messages: [user("Tell me a story about a fox.")] });
story.on("streamEvent", () => story.abort());
await assert.rejects(story.finalMessage(), Anthropic.APIUserAbortError);
console.log("done");
