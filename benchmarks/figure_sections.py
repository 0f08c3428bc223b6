"""Sections of docs/benchmarks.md: the result files, what was measured, and the figures that are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figure_plots import Plot
from benchmarks.figure_tables import (
    accuracy,
    by_engine,
    chosen,
    compared,
    engines,
    faults,
    servers,
    speculation,
    state_errors,
    state_hits,
)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: one or more result files, their explanation and a table of the main figures.

    Attributes:
        file: name in benchmarks/results/ without the ending, or setting |-> name.
        table: makes a Markdown table of the main figures, as lines. With settings it gets setting |-> figures.
        plots: of the first file's figures.
    """

    title: str
    file: str | Mapping[str, str]
    text: str
    table: Callable[[Any], list[str]]
    plots: Sequence[Plot] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,) if isinstance(self.file, str) else tuple(self.file.values())


SECTIONS = (
    Section(
        "Offline throughput beside other engines",
        {
            "60M": "offline_peers",
            "60M, two ranks": "offline_peers_tp2",
            "60M, AVX2": "offline_peers_avx2",
            "60M, AVX2, two ranks": "offline_peers_tp2_avx2",
            "0.5B": "offline_m",
            "0.5B, two ranks": "offline_m_tp2",
            "0.5B, AVX2": "offline_m_avx2",
            "60M, bfloat16, AMX": "offline_amx",
        },
        "Tokens per second of 64, 16 or 32 requests at once (the 32 share a prefix of 512 tokens) and of one stream, "
        "and the time to the first token of a prompt of 1,024 tokens. Llama of 60M parameters or the shape of "
        "Qwen2.5-0.5B, float32 unless it says bfloat16, greedy, the engines taking turns on the same two cores. Two "
        "ranks have one core each. AVX2 is the set of instructions that all engines are limited to; llama.cpp-avx2 "
        "is compiled so. AMX is the processor's; quire-avx512 does not use it.",
        engines,
    ),
    Section(
        "One small model of each kind",
        "families",
        "Random models of 4 to 50M parameters, float32, one sequence, quire / transformers.",
        by_engine(
            "model type", decode_tokens_per_s="decode (tokens/s)", prefill_tokens_per_s="prefill (tokens/s)"
        ),
    ),
    Section(
        "Small models beside llama.cpp",
        "families_peers",
        "The same models, quire / transformers / llama.cpp: tokens per second of processor time, one thread each.",
        by_engine(
            "model type", decode_tokens_per_s="decode (tokens/s)", prefill_tokens_per_s="prefill (tokens/s)"
        ),
    ),
    Section(
        "Loading",
        "loading",
        "The 60M-parameter shape in each format, from the page cache; quire / transformers, or quire alone. Times "
        "and memory are per GB of the stored weights, without the imports. transformers maps full-precision weights, "
        "and so reads them in its first step. Quantized weights of dense layers are dequantized to float32 while "
        "they are read. Memory is the growth of the process at its highest.",
        by_engine(
            "weights",
            stored_gb="stored (GB)",
            load_s_per_gb="load (s/GB)",
            peak_gb_per_gb="peak memory (GB/GB)",
        ),
    ),
    Section(
        "Loading on several nodes",
        "loading_nodes",
        "Until four nodes have a copy of 0.27 GB each from storage of 100 MB/s. Processes stand for nodes.",
        chosen(
            **{
                f"loading__nodes__4__{way}__{figure}": f"{label}, {unit}"
                for way, label in (
                    ("alone", "each for itself"),
                    ("one_replica", "one replica"),
                    ("replicas", "a replica each"),
                )
                for figure, unit in (("s", "time"), ("source_gb", "read"))
            }
        ),
    ),
    Section(
        "Experts on four ranks",
        "experts",
        "A decode step of 32 rows of a small random DeepSeek-V3: 32 experts of which 4 are chosen, data-parallel "
        "attention, four processes on two cores that had other work meanwhile, so that the times differ by chance. "
        "Sent bytes are those between ranks per token and layer; those of all-reduces are computed. The routers "
        "prefer some experts: the load of the busiest rank, as a multiple of the mean, is that of the same choices "
        "with experts in order and where they have moved to.",
        chosen(
            all_reduce__sent_bytes="all-reduce (bytes)",
            all_to_all__sent_bytes="all-to-all (bytes)",
            balanced__sent_bytes="with moving experts (bytes)",
            all_reduce__step_ms="all-reduce (ms)",
            all_to_all__step_ms="all-to-all (ms)",
            balanced__step_ms="with moving experts (ms)",
            balanced__busiest_before="busiest rank before",
            balanced__busiest_after="and after",
        ),
    ),
    Section(
        "Two pipeline stages",
        "stages",
        "A random Llama of 46 million parameters on two CPU ranks, with 16 sequences and a queue. A rank waits for "
        "plans, for the other stage and in collectives. The two cores had other work; computing is processor time.",
        chosen(
            stages__rank0__waited="first stage waits",
            stages__rank1__waited="last stage waits",
            stages__rank0__processor_ms="first stage computes",
            stages__rank1__processor_ms="last stage computes",
            tensor__rank0__waited="tensor-parallel rank waits",
            tensor__rank0__processor_ms="and computes",
            stages__tokens_per_s="two stages",
            tensor__tokens_per_s="tensor-parallel",
        ),
    ),
    Section(
        "LoRA adapters",
        "lora",
        "A decode step of 64 rows of the 60M-parameter shape, float32, with adapters of rank 8 of every projection.",
        chosen(
            step__none__ms="no adapter",
            step__one__ms="one adapter on all rows",
            step__many__ms="64 adapters, one per row",
        ),
    ),
    Section(
        "Structured outputs",
        "structured_outputs",
        "Schemas that each backend supports, the time to compile one, and a decode step of 64 rows of the "
        "60M-parameter shape with a constraint on each, in turns with the same step without.",
        chosen(
            structured__schemastore__guidance__supported="37 schemas of SchemaStore, supported by llguidance",
            structured__schemastore__xgrammar__supported="the same, by xgrammar",
            structured__schemastore__guidance__compile_ms_p50="compile, llguidance",
            structured__matching__guidance__v131072__mask_us_p50="mask, vocabulary of 131,072, llguidance",
            structured__matching__xgrammar__v131072__mask_us_p50="the same, xgrammar",
            structured__step__s__guidance__added_share="added to the step, llguidance",
            structured__step__s__xgrammar__added_share="the same, xgrammar",
        ),
    ),
    Section(
        "Prompts with images",
        "images",
        "A random Qwen2.5-VL of 15 million parameters behind HTTP, with JPEG files of one megapixel in data URLs. "
        "Gaps are those of four streams of text, beside prompts of 1,238 tokens: text, or an image of four "
        "megapixels that is shrunk to one; and beside hostile files and bodies, which are refused. The client has "
        "the same cores.",
        chosen(
            images__first_token_ms__text="first token, new text of as many tokens",
            images__first_token_ms__cold="first token, a new image",
            images__first_token_ms__encoded="first token, its encoder output is held",
            images__first_token_ms__prefix="first token, its prefix is cached",
            images__first_token__encoder_percent="share that a held encoder output saves",
            images__per_s="images in turn by four clients",
            images__memory_mb__outputs="encoder outputs on each rank",
            images__memory_mb__tensors="tensors in the scheduler",
            images__gap_ms__alone__p99="gap between tokens, p99, alone",
            images__gap_ms__beside_text__p99="gap, p99, beside text",
            images__gap_ms__beside_images__p99="gap, p99, beside images",
            images__gap_ms__beside_refused__p99="gap, p99, beside images that are refused",
        ),
    ),
    Section(
        "Prompts with images beside vLLM",
        "image_servers",
        "The same model and files, prompt by prompt in turns; nothing else ran.",
        servers(
            first_token_ms__text="first token, new text of as many tokens (ms)",
            first_token_ms__cold="a new image",
            first_token_ms__encoded="its encoder output is held",
            first_token_ms__prefix="its prefix is cached",
            per_s="images/s",
        ),
    ),
    Section(
        "Answers of the bundled vision model",
        "vision_model",
        "Share of 300 held-out questions of each kind that `demo-vision` answers as drawn, word for word: greedy, in "
        "transformers, in bfloat16.",
        chosen(
            vision_model__accuracy__color="color of what is shown",
            vision_model__accuracy__shape="which of five shapes",
            vision_model__accuracy__digit="which digit",
            vision_model__accuracy__count="one to four shapes",
            vision_model__accuracy__background="color of the background",
            vision_model__accuracy__yes_no="yes or no, and the truth",
            vision_model__accuracy__describe="a description with every fact",
            vision_model__accuracy__two_pictures="one or both of two pictures in a message",
            vision_model__accuracy__newer_picture="the newer one of two pictures",
            vision_model__accuracy__no_picture="a message of text alone",
        ),
    ),
    Section(
        "Speculative decoding",
        "speculation",
        "The demo model in float32 with repeated text (ngram), with its EAGLE-3 head and with a smaller model, "
        "beside the same engine without drafts, in turns. Prompts of quote repeat their beginning; prose is "
        "continued text, greedy; sampled is prose at temperature 1; mixed is quotes and prose at random. Workloads "
        "without drafts are left out: steps of more than 8 sequences have none on a CPU. Measured when lengths were "
        "chosen per row, before drafts were switched on and off as a whole (decision 20).",
        speculation,
    ),
    Section(
        "Gateway",
        "gateway",
        "Streamed tokens per second that one gateway process writes, and the latency that it adds to the scheduler's "
        "own times, without a model; servers and client share the two cores.",
        chosen(
            gateway__grpc__256__tokens_per_s="gRPC, 256 streams",
            gateway__http__256__tokens_per_s="HTTP, 256 streams",
            gateway__grpc__1024__tokens_per_s="gRPC, 1,024 streams",
            gateway__http__1024__tokens_per_s="HTTP, 1,024 streams",
            gateway__grpc__1__added_ms_p50="added, gRPC, one stream at 20 tokens/s",
            gateway__grpc__256__added_ms_p50="added, gRPC, 256 such streams",
            gateway__grpc__idle_stream_bytes="memory of an idle stream",
        ),
    ),
    Section(
        "HTTP server beside vLLM's",
        "http_servers",
        "Streamed completions of the 60M-parameter shape in float32, with the same client and prompts.",
        chosen(
            http_servers__quire__1__tokens_per_s="quire, one stream",
            http_servers__vllm__1__tokens_per_s="vLLM, one stream",
            http_servers__quire__16__tokens_per_s="quire, 16 streams",
            http_servers__vllm__16__tokens_per_s="vLLM, 16 streams",
            http_servers__quire__16__first_ms_p50="first token, quire, 16 streams",
            http_servers__vllm__16__first_ms_p50="first token, vLLM, 16 streams",
        ),
    ),
    Section(
        "Demo",
        "demo",
        "`make demo`: two tensor-parallel CPU ranks, twelve concurrent requests over gRPC.",
        chosen(
            demo__ready="start to ready",
            demo__throughput="throughput",
            demo__ttft__p50="time to first token, median",
            demo__itl__p50="time between tokens, median",
        ),
    ),
    Section(
        "Scheduler",
        "scheduler",
        "CPU time of the control plane per step in steady decode, and of admitting a request.",
        chosen(
            scheduler__step_us__64__on="step, 64 sequences",
            scheduler__step_us__256__on="step, 256 sequences",
            scheduler__step_us__1024__on="step, 1,024 sequences",
            scheduler__plan_bytes__256="plan, 256 sequences",
            scheduler__admit_us__blocks__1000000="admission, pool of a million blocks",
            scheduler__admit_us__queued__100000="admission, 100,000 requests queued",
        ),
    ),
    Section(
        "KV memory",
        "memory",
        "Prefix cache hits on recorded traces.",
        chosen(
            memory__hit_rate__coding_multiturn="prefix cache hits, coding agents",
            memory__hit_rate__websearch_multiturn="prefix cache hits, web agents",
        ),
    ),
    Section(
        "States of recurrent and hybrid models",
        "state_memory",
        "Share of prompt tokens found, with states as large as 1,584 tokens: the snapshots that are served, blocks "
        "alone without states, and a snapshot after each 528 tokens in the same memory. A split has that many times "
        "the slots. Conversations are scaled down 32 times.",
        state_hits,
    ),
    Section(
        "Recurrent states in bfloat16",
        "state_dtype",
        "Mean difference of a token's log-probability, in nats, from that of a model and states in float32. The "
        "models and their 512 tokens are random; each token rounds the states.",
        state_errors,
    ),
    Section(
        "Quantization",
        "perplexity",
        "Perplexity of the demo model on held-out text.",
        chosen(
            perplexity__float32="float32",
            perplexity__int8="weights in int8",
            perplexity__fp8_w8a8="weights and activations in float8",
            perplexity__gptq_int4_g64="weights in int4, GPTQ's layout, groups of 64",
            perplexity__awq_int4_g64="weights in int4, AWQ's layout, groups of 64",
            perplexity__kv_int8="KV cache in int8",
            perplexity__kv_fp8="KV cache in float8",
        ),
    ),
    Section(
        "Routing",
        "routing",
        "Prefix cache hits over several replicas, by routing policy.",
        chosen(
            fleet__hit_rate__coding_multiturn__8__cache_aware="coding agents, 8 replicas, by cached prefix",
            fleet__hit_rate__coding_multiturn__8__random="coding agents, 8 replicas, random",
            fleet__hit_rate__websearch_multiturn__8__cache_aware="web agents, 8 replicas, by cached prefix",
            fleet__hit_rate__websearch_multiturn__8__random="web agents, 8 replicas, random",
        ),
        (
            Plot(
                "routing",
                "Prompt tokens found cached, web agents",
                "replicas",
                "share",
                {
                    "by cached prefix": "fleet.hit_rate.websearch_multiturn.*.cache_aware",
                    "round robin": "fleet.hit_rate.websearch_multiturn.*.round_robin",
                    "random": "fleet.hit_rate.websearch_multiturn.*.random",
                },
            ),
        ),
    ),
    Section(
        "Autoscaling",
        "autoscale",
        "The autoscaler on recorded arrivals beside the smallest fixed fleet that meets the target wait of 10 s.",
        chosen(
            fleet__within_target__azure_code_2023_shift__quire="8-hour shift, code: within the target",
            fleet__gpu_hours__azure_code_2023_shift__quire="8-hour shift, code: GPU-hours",
            fleet__gpu_hours__azure_code_2023_shift__fixed="the same, fixed fleet",
            fleet__within_target__azure_conv_2023_shift__quire="8-hour shift, chat: within the target",
            fleet__gpu_hours__azure_conv_2023_shift__quire="8-hour shift, chat: GPU-hours",
            fleet__gpu_hours__azure_conv_2023_shift__fixed="the same, fixed fleet",
        ),
    ),
    Section(
        "Autoscaling over a day",
        "autoscale_day",
        "Days of bursty code traffic on a fleet that is one queue: the autoscaler beside the smallest fixed fleet "
        "with 99 % of the requests within 10 s, a policy that knows the load but no burst, and an oracle that knows "
        "each arrival. The defaults were chosen on the first day.",
        chosen(
            day__within_target__code_1__quire="first day: within the target",
            day__gpu_hours__code_1__quire="first day: GPU-hours",
            day__within_target__code_2__quire="second day: within the target",
            day__gpu_hours__code_2__quire="second day: GPU-hours",
            day__gpu_hours__code_2__fixed="the same, fixed fleet",
            day__within_target__code_2__short_memory="the same, former defaults: within the target",
            day__gpu_hours__code_2__short_memory="the same, former defaults: GPU-hours",
            day__gpu_hours__code_2__curve="the same, load known",
            day__gpu_hours__code_2__oracle="the same, oracle",
        ),
    ),
    Section(
        "Chunked prefill and scaling in simulated time",
        "simulated_figures",
        "azure_conv_2023 at three times its recorded speed on one simulated H100 with a Llama of 8 billion "
        "parameters, by the tokens of a step; and at twice the speed for each of several replicas.",
        chosen(
            chunk__256__itl_ms__p99="256 tokens per step: between tokens, p99",
            chunk__256__ttft_ms__p99="the same, to the first token, p99",
            chunk__2048__itl_ms__p99="2,048 tokens: between tokens, p99",
            chunk__2048__ttft_ms__p99="the same, to the first token, p99",
            chunk__8192__itl_ms__p99="whole prompts: between tokens, p99",
            chunk__8192__ttft_ms__p99="the same, to the first token, p99",
            replicas__1__output_tokens_per_s_of_each="1 replica: throughput",
            replicas__8__output_tokens_per_s_of_each="8 replicas: throughput of each",
            ranks__1__output_tokens_per_s="1 rank: throughput",
            ranks__8__output_tokens_per_s="8 ranks: throughput",
        ),
        (
            Plot(
                "chunks",
                "Time between tokens by the tokens of a step",
                "tokens of a step",
                "milliseconds",
                {"p99": "chunk.*.itl_ms.p99", "p50": "chunk.*.itl_ms.p50"},
                log_x=True,
            ),
            Plot(
                "replicas",
                "Throughput by replicas, at the same load for each",
                "replicas",
                "output tokens/s of each",
                {"": "replicas.*.output_tokens_per_s_of_each"},
            ),
            Plot(
                "ranks",
                "Throughput of one replica by its ranks",
                "ranks",
                "output tokens/s",
                {"": "ranks.*.output_tokens_per_s"},
            ),
        ),
    ),
    Section(
        "A thousand replicas and a hundred gateways",
        "large_fleet",
        "Gateways, the controller and schedulers that serve, in one process and in simulated time, each gateway "
        "connected to 130 replicas. Processor time is of one of each per simulated second. "
        "Half a request per second of each.",
        chosen(
            large_fleet__traffic__gateway_cpu="a gateway, under traffic",
            large_fleet__traffic__gateway_messages="its messages",
            large_fleet__memory__gateway_mb="its memory for all replicas",
            large_fleet__traffic__replica_cpu="a scheduler, under traffic",
            large_fleet__traffic__replica_messages="its messages",
            large_fleet__traffic__controller_cpu="the controller, under traffic",
            large_fleet__shared__busiest="80 % share a prefix: busiest replica over the mean",
            large_fleet__shared__ttft_ms__p99="the same: first token, p99",
            large_fleet__loss__noticed_s="a tenth killed at once: noticed",
            large_fleet__loss__failed="the same: failed requests",
            large_fleet__loss__replaced_s="the same: replaced",
            large_fleet__restart__adopted_s="another controller: all replicas adopted",
            large_fleet__restart__controller_cpu_s="its processor time for that",
        ),
    ),
    Section(
        "Fleets that grow",
        {
            "64 x 16, all pairs": "large_fleet_all",
            "64 x 16": "large_fleet_64",
            "256 x 64": "large_fleet_256",
        },
        "Replicas x gateways. In the last two columns each gateway uses 16.",
        compared(
            large_fleet__connections="pairs",
            large_fleet__traffic__gateway_messages="messages of a gateway",
            large_fleet__traffic__replica_messages="of a replica",
        ),
    ),
    Section(
        "Paged and contiguous memory",
        "paged_attention",
        "azure_conv_2023 at ten times its recorded speed on one simulated H100 with a Llama of 8 billion parameters, "
        "in the same memory of 131,072 tokens, by the tokens of a block. A block of 8,192 tokens is as long as the "
        "longest sequence, and so what contiguous memory reserves. Sharing: the blocks that a running sequence of a "
        "trace of conversations holds, with the prefix cache and without.",
        chosen(
            paged__16__waste="blocks of 16: memory without a token",
            paged__256__waste="blocks of 256",
            paged__1024__waste="blocks of 1,024",
            paged__8192__waste="contiguous",
            paged__16__running="blocks of 16: at once",
            paged__8192__running="contiguous: at once",
            paged__16__requests_per_s="blocks of 16: requests",
            paged__8192__requests_per_s="contiguous: requests",
            sharing__coding_multiturn__saved="saved by sharing, coding",
            sharing__websearch_multiturn__saved="saved by sharing, web search",
            sharing__mooncake_conversation__saved="saved by sharing, conversations",
        ),
        (
            Plot(
                "waste",
                "Held memory without a token",
                "tokens of a block; 8,192: contiguous",
                "%",
                {"": "paged.*.waste"},
                log_x=True,
            ),
            Plot(
                "batch",
                "Sequences that run at once",
                "tokens of a block; 8,192: contiguous",
                "sequences",
                {"": "paged.*.running"},
                log_x=True,
            ),
            Plot(
                "admission",
                "Throughput at equal memory",
                "tokens of a block; 8,192: contiguous",
                "requests/s",
                {"": "paged.*.requests_per_s"},
                log_x=True,
            ),
        ),
    ),
    Section(
        "Outputs and beams",
        "paged_engine",
        "Blocks that the outputs and beams of a request share: the demo model, with the mean lengths of the "
        "PagedAttention paper's traces. The file also has throughputs with preemption by the tokens of a block, "
        "which are not shown: a single run of each, on a machine so busy that they differ by chance.",
        chosen(
            sharing__alpaca__outputs__2__saved="saved, 2 outputs, lengths of Alpaca",
            sharing__alpaca__outputs__6__saved="6 outputs",
            sharing__alpaca__beams__2__saved="2 beams",
            sharing__alpaca__beams__6__saved="6 beams",
            sharing__sharegpt__outputs__2__saved="saved, 2 outputs, lengths of ShareGPT",
            sharing__sharegpt__outputs__6__saved="6 outputs",
            sharing__sharegpt__beams__2__saved="2 beams",
            sharing__sharegpt__beams__6__saved="6 beams",
        ),
        (
            Plot(
                "sharing",
                "Blocks saved by sharing within a request",
                "outputs, or beams",
                "%",
                {
                    "beams, ShareGPT": "sharing.sharegpt.beams.*.saved",
                    "beams, Alpaca": "sharing.alpaca.beams.*.saved",
                    "outputs, ShareGPT": "sharing.sharegpt.outputs.*.saved",
                    "outputs, Alpaca": "sharing.alpaca.outputs.*.saved",
                },
            ),
        ),
    ),
    Section(
        "Accuracy of simulation",
        {"1": "simulation_accuracy", "2": "simulation_accuracy_tp2"},
        "Simulated over real figures of the demo model, less 1, on workloads that were not in the fit. Aimed at are "
        "5 % of the throughput and 10 % of the latencies: more is a miss. One rank was calibrated before and "
        "after each workload, in processor time on cores that were busy with other work; two ranks, in wall time on "
        "idle ones, before each workload alone. The files have errors by kind of step.",
        accuracy,
    ),
    Section(
        "Overload",
        "overload",
        "Goodput of a replica at ten times the requests that it can serve, as a share of its peak.",
        chosen(
            overload__simulated__deadline__at_10x="with deadlines, in simulated time",
        ),
    ),
    Section(
        "Overload of a server",
        "overload_server",
        "Goodput of `quire serve` with a model of 60 million parameters at ten times the requests that it can serve, "
        "as a share of its peak before and after; the load was made on the same two cores.",
        chosen(
            overload__grpc__deadline__at_10x="over gRPC, with deadlines",
            overload__grpc__none__at_10x="over gRPC, without",
            overload__http__deadline__at_10x="over HTTP, with deadlines",
            overload__http__none__at_10x="over HTTP, without",
            overload__grpc__deadline__at_10x_per_core="over gRPC, with deadlines, per core that the callers leave",
            overload__http__deadline__at_10x_per_core="over HTTP, with deadlines, per core that the callers leave",
            overload__grpc__deadline__refusal_server_ms="CPU time of gateway and scheduler per refused call, gRPC",
            overload__grpc__deadline__refusal_caller_ms="CPU time of its caller",
            overload__grpc__light_tenant="calls of a light tenant beside the overload, complete in time, gRPC",
            overload__http__light_tenant="the same, HTTP",
        ),
    ),
    Section(
        "Faults under work",
        "chaos",
        "Requests of all kinds over gRPC and HTTP while processes are killed and stopped, steps fail, the network is "
        "cut and the disk is full; each answer is compared with the undisturbed one. The times count from the "
        "beginning of a fault until a new request is answered. They include the fault itself where it lasts (up to "
        "5 s) and the start of a killed gateway's successor.",
        faults,
    ),
    Section(
        "Faults of the network between nodes",
        "chaos_network",
        "The same for a fleet whose second node is cut off for up to 12 s, loses packets, and is slow.",
        faults,
    ),
    Section(
        "Soak",
        "soak",
        "Steady mixed work with a random fault per minute; resources of the gateway and the schedulers after the "
        "first quarter and at the end.",
        chosen(
            soak__requests="requests in 61 minutes",
            soak__faults="faults",
            soak__problems="lost or changed answers, leaks",
            soak__early__num_bytes="their memory, early",
            soak__late__num_bytes="the same, late",
            soak__early__num_descriptors="their descriptors, early",
            soak__late__num_descriptors="the same, late",
        ),
    ),
    Section(
        "Cold starts",
        "cold_start",
        "From asking for a replica of the demo model to its first token; its weights are in the page cache. The "
        "server starts Ray as well.",
        chosen(
            replica_total_s="a replica whose processes are prepared",
            replica_processes_s="its processes",
            replica_load_s="its weights and KV memory",
            replica_canary_s="its first token",
            replica_unprepared_total_s="a replica whose processes are not prepared",
            replica_unprepared_processes_s="its processes",
            serve_total_s="`quire serve demo`, from the command to ready",
            serve_stop_s="from SIGTERM to its end",
        ),
    ),
    Section(
        "Recovery",
        "recovery",
        "Time from `kill -9` to the next token of the slowest of four streams.",
        chosen(
            recovery__kill_rank__p50_s="a rank, median",
            recovery__kill_rank__max_s="a rank, longest",
            recovery__kill_scheduler__p50_s="the scheduler, median",
            recovery__restart_all_s="a restart of the whole server instead",
        ),
    ),
    Section(
        "Recovery with a standby",
        "recovery_standby",
        "The same with `--standby-weights`: a started process maps weights and KV of the rank that was killed.",
        chosen(
            recovery__kill_rank__p50_s="a rank, median",
            recovery__kill_rank__max_s="a rank, longest",
        ),
    ),
    Section(
        "Stored KV",
        "kv_tiers",
        "Time to the first token after a restart with `--kv-disk`, and the rate at which blocks are read and "
        "verified. The 60M-parameter shape, float32; the machine was busy.",
        chosen(
            kv_tiers__2000__computed="prompt of 2,000 tokens, computed",
            kv_tiers__2000__read__page_cache="2,000 tokens, read from the page cache",
            kv_tiers__2000__read__tmpfs="2,000 tokens, read from /dev/shm",
            kv_tiers__2000__read__disk="2,000 tokens, read from the disk",
            kv_tiers__8000__computed="prompt of 8,000 tokens, computed",
            kv_tiers__8000__read__page_cache="8,000 tokens, read from the page cache",
            kv_tiers__8000__read__tmpfs="8,000 tokens, read from /dev/shm",
            kv_tiers__8000__read__disk="8,000 tokens, read from the disk",
            kv_tiers__8000__rate__tmpfs="8,000 tokens from /dev/shm, rate",
            kv_tiers__8000__rate__disk="8,000 tokens from the disk, rate",
            kv_tiers__8000__rate__disk__plain="8,000 tokens from the disk, rate of plain reads",
        ),
    ),
    Section(
        "KV that travels",
        "kv_transfer",
        "Rates at which a rank reads the blocks of a rank in another process, 256 MiB at once, beside a copy of "
        "memory and TCP connections, with a core for each side: bytes by the processor time of the busier process, "
        "since the machine was busy.",
        chosen(
            kv_transfer__busy__memcpy="copy of memory",
            kv_transfer__busy__memory="blocks from the lender's memory, on one host",
            kv_transfer__busy__memory_share="of the copy of memory",
            kv_transfer__busy__buffer="blocks through shared memory, on one host",
            kv_transfer__busy__tcp_plain="plain TCP connection",
            kv_transfer__busy__tcp_encrypted="TCP connection with AES-GCM",
            kv_transfer__busy__stream="blocks over TCP with AES-GCM",
            kv_transfer__busy__stream_share="of the connection with AES-GCM",
            kv_transfer__busy__frames="blocks over ZeroMQ with CURVE",
        ),
    ),
    Section(
        "Prefill and decode apart",
        "prefill_split_server",
        "Four clients stream short prompts while prompts of 1,500 tokens arrive, on two replicas of one thread of "
        "the 60M-parameter shape: two equal ones, or one for prompts and one for the rest. The machine was busy.",
        chosen(
            split_server__equal__gap__p50="equal replicas: time between tokens, median",
            split_server__roles__gap__p50="two roles: the same",
            split_server__equal__gap__p99="equal replicas: time between tokens, 99 %",
            split_server__roles__gap__p99="two roles: the same",
            split_server__equal__gap__p999="equal replicas: time between tokens, 99.9 %",
            split_server__roles__gap__p999="two roles: the same",
            split_server__equal__long__first_token="equal replicas: first token of long prompts",
            split_server__roles__long__first_token="two roles: the same",
            split_server__equal__tokens="equal replicas: tokens of the four clients",
            split_server__roles__tokens="two roles: the same",
        ),
    ),
    Section(
        "Prefill and decode apart, simulated",
        "prefill_split",
        "Llama-3.1-8B on four H100s, steps of assumed times: four equal replicas, or one for prompts and three for "
        "the rest, by the code that serves. Prompts of 12,000 tokens among short ones, and a part of a trace of "
        "conversations; and the mean time of requests against the same replicas without splits, where the split does "
        "not pay.",
        chosen(
            split__documents__equal__gap__p99="documents, equal replicas: time between tokens, 99 %",
            split__documents__roles__gap__p99="documents, two roles: the same",
            split__documents__equal__request__mean="documents, equal replicas: mean time of a request",
            split__documents__roles__request__mean="documents, two roles: the same",
            split__documents__equal__first_token__p99="documents, equal replicas: first token, 99 %",
            split__documents__roles__first_token__p99="documents, two roles: the same",
            split__conversation__equal__gap__p99="conversations, equal replicas: time between tokens, 99 %",
            split__conversation__roles__gap__p99="conversations, two roles: the same",
            split__conversation__equal__request__mean="conversations, equal replicas: mean time of a request",
            split__conversation__roles__request__mean="conversations, two roles: the same",
            split__chat__loss="short prompts: loss by the split",
            split__idle__loss="long prompts, one at a time: loss by the split",
            split__borderline__loss__worst="prompts of 500 to 8,000 tokens at three rates: greatest loss",
            split__borderline__loss__best="the same: least loss",
        ),
    ),
    Section(
        "Idle cost",
        "idle",
        "CPU use of `quire serve demo` without requests. Ray's library in the processes of quire is included.",
        chosen(
            idle__gateway_percent="gateway",
            idle__scheduler_percent="scheduler",
            idle__rank_percent="rank",
            idle__ray_percent="Ray's own processes",
        ),
    ),
    Section(
        "An idle fleet",
        "idle_fleet",
        "CPU time per second without requests: of one gateway, the controller and one scheduler, whose ranks take no "
        "time. The machine was busy with other work.",
        chosen(
            idle_fleet__gateway_cpu__100__1="a gateway of 100 replicas",
            idle_fleet__controller_cpu__100__1="the controller of 100 replicas",
            idle_fleet__replica_cpu_ms__100__1="a scheduler of one gateway",
            idle_fleet__replica_cpu_ms__10__100="a scheduler of 100 gateways",
            idle_fleet__replica_messages__10__100="messages of a scheduler of 100 gateways",
        ),
    ),
    Section(
        "CPU kernels",
        "kernels",
        "Each op alone, beside PyTorch and beside the machine's copy and matmul rates.",
        chosen(
            kernels__copy__gb_per_s="copy",
            kernels__matmul__gflops="matmul",
            kernels__linear__3072x512_t1__us="linear 3072 x 512, one token",
            kernels__linear__3072x512_t1__f_linear_us="the same, F.linear",
        ),
    ),
)
