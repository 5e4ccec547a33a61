// What the scripts of the JavaScript clients share. See weather.py.
import { z } from "zod";

export const API = `${process.env.SERVER_URL}/v1`;
export const MODEL = "tiny";
export const TEXT_LIMIT = Number(process.env.TEXT_LIMIT);
export const JSON_LIMIT = 1500;
export const QUESTION = "Weather?";
export const USER = { role: "user", content: QUESTION };
export const Weather = z.object({ city: z.enum(["Rome", "Oslo"]), days: z.literal([1, 2, 3]) });

export async function report(ways) {
  const results = {};
  for (const [way, cases] of Object.entries(ways)) {
    results[way] = {};
    for (const kind of process.argv.slice(2)) if (cases[kind]) results[way][kind] = await cases[kind]();
  }
  console.log(JSON.stringify(results));
}
