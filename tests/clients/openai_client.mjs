// OpenAI's JavaScript package, which lies in the node_modules of the working directory. See client_operations.py.

import { createRequire } from "node:module";

const OpenAI = createRequire(`${process.cwd()}/`)("openai");

const MODEL = "tiny";
const MESSAGES = [{ role: "user", content: "When?" }];
const TOOL = {
  type: "function",
  function: {
    name: "now",
    description: "Return the time.",
    parameters: { type: "object", properties: { a: { type: "integer" } } },
  },
};

const [url, operation] = process.argv.slice(2);
const { completions } = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 }).chat;

function textAndCalls({ content, tool_calls }) {
  return [content, tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)])];
}

const operations = {
  async chat() {
    const { choices, usage } = await completions.create({ model: MODEL, messages: MESSAGES });
    return [choices[0].message.content, usage.completion_tokens];
  },

  async stream() {
    const texts = [];
    for await (const chunk of await completions.create({ model: MODEL, messages: MESSAGES, stream: true })) {
      texts.push(chunk.choices[0].delta.content);
    }
    return texts.filter(Boolean);
  },

  async tools() {
    const { choices } = await completions.create({ model: MODEL, messages: MESSAGES, tools: [TOOL] });
    return textAndCalls(choices[0].message);
  },

  async streamed_tools() {
    const stream = completions.stream({ model: MODEL, messages: MESSAGES, tools: [TOOL] });
    return textAndCalls(await stream.finalMessage());
  },

  async tool_result() {
    const call = { id: "call-1", type: "function", function: { name: "now", arguments: "{}" } };
    const asked = { role: "assistant", content: null, tool_calls: [call] };
    const result = { role: "tool", tool_call_id: "call-1", content: "12:00" };
    const messages = [...MESSAGES, asked, result];
    const { choices } = await completions.create({ model: MODEL, messages, tools: [TOOL] });
    return choices[0].message.content;
  },

  async unknown_model() {
    try {
      await completions.create({ model: "other", messages: MESSAGES });
    } catch (error) {
      return error.constructor.name;
    }
    return "";
  },
};

console.log(JSON.stringify(await operations[operation]()));
