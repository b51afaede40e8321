// Holds a conversation with a tool call and a follow-up through the AI SDK, and prints its answers as JSON.
// Usage: node run_ai_sdk.mjs URL KEY PROVIDER generate|stream
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [url, apiKey, provider, mode] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey, name: "instar" };
const create = { openai: createOpenAI, anthropic: createAnthropic, "openai-compatible": createOpenAICompatible };
const model = create[provider](options)("instar");
const tools = {
  calc: tool({
    description: "Evaluate arithmetic.",
    inputSchema: z.object({ expression: z.string() }),
    execute: async () => "7440",
  }),
};
const messages = [];
const answers = [];
for (const content of ["What is 24 * 310?", "thanks"]) {
  messages.push({ role: "user", content });
  const call = { model, messages, tools, stopWhen: stepCountIs(4), maxOutputTokens: 200, maxRetries: 0 };
  const result = mode === "stream" ? streamText(call) : await generateText(call);
  answers.push(await result.text);
  messages.push(...(await result.response).messages);
}
console.log(JSON.stringify(answers));
