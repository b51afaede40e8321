// Opens groups at a gateway with plain fetch, and runs each slot with the npm package openai until the run has
// trained all its steps. Arguments: the gateway's URL and the size of a group. The admin key is in
// INSTAR_ADMIN_KEY. Prints the number of completed slots.
import OpenAI from "openai";

const [url, size] = process.argv.slice(2);
const headers = { authorization: `Bearer ${process.env.INSTAR_ADMIN_KEY}`, "content-type": "application/json" };
const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

// Returns null if the run is finished, which the gateway reports with 409 or by exiting.
async function openGroup(number) {
  for (;;) {
    let response;
    try {
      const body = JSON.stringify({ task: { number }, size: Number(size), deadline_s: 60 });
      response = await fetch(`${url}/groups`, { method: "POST", headers, body });
    } catch {
      return null;
    }
    if (response.status === 429) {
      await sleep(Number(response.headers.get("retry-after")));
    } else if (response.status === 409) {
      return null;
    } else if (response.status === 201) {
      return await response.json();
    } else {
      throw new Error(`POST /groups: ${response.status} ${await response.text()}`);
    }
  }
}

// Asks for a reply and rewards even numbers of characters, so that the rewards of a group differ.
async function runSlot(slot, number) {
  const client = new OpenAI({ baseURL: slot.base_url, apiKey: slot.api_key });
  const messages = [{ role: "user", content: `say ${number}` }];
  const reply = await client.chat.completions.create({ model: "instar", messages, max_tokens: 4 });
  const reward = reply.choices[0].message.content.length % 2 === 0 ? 1 : 0;
  const response = await fetch(`${slot.session_url}/complete`, {
    method: "POST",
    headers: { ...headers, authorization: `Bearer ${slot.api_key}` },
    body: JSON.stringify({ reward }),
  });
  if (!response.ok) throw new Error(`complete: ${response.status} ${await response.text()}`);
}

let completed = 0;
for (let number = 0; ; number++) {
  const group = await openGroup(number);
  if (group === null) break;
  await Promise.all(group.slots.map((slot) => runSlot(slot, number)));
  completed += group.slots.length;
}
console.log(completed);
