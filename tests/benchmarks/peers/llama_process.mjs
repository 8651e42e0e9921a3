// llama.cpp for the side-by-side figures: `node llama_process.mjs ENVIRONMENT MODEL THREADS`.
//
// node-llama-cpp out of ENVIRONMENT/node_modules in this process, with a context for each number of streams that was asked for.
// Lines on the standard streams are those of systems.py. The other defaults are the library's.

import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const NUM_TOKENS = 1024;  // of a sequence: the longest prompt and what is new
const [environment, modelPath, threads] = process.argv.slice(2);
const library = createRequire(`${environment}/`).resolve("node-llama-cpp");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(library));

const llama = await getLlama({gpu: false, build: "never", maxThreads: 0, logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath});
const sequences = new Map();  // by number of streams
await sequencesFor(1);
console.log(JSON.stringify({}));

for await (const line of createInterface({input: process.stdin})) {
    const job = JSON.parse(line);
    const own = await sequencesFor(job.prompts.length);
    const found = await Promise.all(job.prompts.map((prompt, place) => stream(own[place], prompt, job.num_new)));
    console.log(JSON.stringify({times: found.map(({times}) => times), tokens: found.map(({tokens}) => tokens)}));
}
process.exit(0);

async function sequencesFor(count) {
    if (!sequences.has(count)) {
        const context = await model.createContext({sequences: count, contextSize: NUM_TOKENS, threads: Number(threads)});
        sequences.set(count, Array.from({length: count}, () => context.getSequence()));
    }
    return sequences.get(count);
}

async function stream(sequence, prompt, numNew) {
    await sequence.clearHistory();
    const begin = performance.now(), times = [], tokens = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        times.push((performance.now() - begin) / 1000);
        tokens.push(token);
        if (tokens.length === numNew)
            break;
    }
    return {times, tokens};
}
