// OpenAI's own client against the server: node openai.mjs URL KEY
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url + "/v1", apiKey, maxRetries: 0 });
const model = "k3-nano";
const user = (content) => ({ role: "user", content });
const answer = "The capital of Japan is Tokyo.";
const ask = { model, messages: [user("What is the capital of Japan?")] };

const whole = await client.chat.completions.create(ask);
assert.equal(whole.choices[0].message.content, answer);
assert.equal(whole.choices[0].finish_reason, "stop");
assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);

let text = "", usage;
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, answer);
assert.ok(usage.completion_tokens > 0);

const tools = [{ type: "function", function: {
  name: "get_weather", description: "Get the current weather for a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
} }];
const weather = { model, tools, messages: [user("What is the weather in Paris?")] };
const runner = client.chat.completions.stream(weather);
const called = await runner.finalChatCompletion();
const call = called.choices[0].message.tool_calls[0];
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
const after = await client.chat.completions.create({ ...weather, messages: [
  ...weather.messages, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "rain" },
] });
assert.equal(after.choices.length, 1);

await assert.rejects(client.chat.completions.create({ ...ask, n: 2 }), (e) => e.status === 400 && e.param === "n");
await assert.rejects(new OpenAI({ baseURL: url + "/v1", apiKey: "wrong", maxRetries: 0 }).models.list(), (e) => e.status === 401);

const story = await client.chat.completions.create({ model, messages: [user("Tell me a story about a fox.")], stream: true });
for await (const _ of story) {
  story.controller.abort();
}
assert.ok(story.controller.signal.aborted);
assert.equal((await client.models.list()).data[0].id, model);
console.log("done");
