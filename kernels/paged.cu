// Rows of a chunk between a staging buffer, where they lie as in its object, and the pages of an engine's KV cache.
//
// A *part* is where a plane's rows are (or their K, or their V), a *span* is tokens of the chunk that are side by side
// in a block. Each thread block takes tiles of (part, span) pairs, so a few blocks are enough to keep up with the bus
// and the rest of the GPU stays with the engine. No barriers and no shared memory: the very same source runs on a CPU
// in the tests (tests/gpu/kernel.cc).
#ifndef KVGATE_ON_CPU
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
#endif

// One for each part of the cache, in device memory. Strides are bytes. As `PartRow` in src/engine/copy/cuda/kernel.rs.
struct Part {
  u64 address;       // of block 0, token 0, and the first head that this rank has
  u64 block_stride;
  u64 token_stride;
  u64 head_stride;
  u64 share_offset;  // of its plane's share, in the shares of all planes one after the other
  u32 row_bytes;
  u32 row_offset;    // of the part, in the row
  u32 run_bytes;     // of the part
  u32 heads;         // that this rank has
};

// As `Span` in src/engine/copy/mapping.rs.
struct Span {
  u32 token;   // first one, in the chunk
  u32 tokens;
  u32 block;
  u32 offset;  // first one, in the block
};

// As `Params` in src/engine/copy/cuda/kernel.rs.
struct Params {
  const Part* parts;
  const Span* spans;
  u64 staging;        // where the first plane's share is
  u64 share_offset;   // of that plane
  u32 parts_count;
  u32 spans_count;
  u32 tiles;          // of a pair, at most
  u32 unit;           // bytes of an access: 16, 4 or 1; divides all that is above
  u32 chunk_tokens;
  u32 blocks;
  u32 block_tokens;
  u32 reserved;
};

// Read once, so it need not stay in the cache that the engine uses.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
#else
  return *from;
#endif
}
__device__ __forceinline__ u32 load_once(const u32* from) { return *from; }
__device__ __forceinline__ u8 load_once(const u8* from) { return *from; }

// How many units a thread has under way.
constexpr u32 DEPTH = 4;

template <bool SCATTER, typename Unit>
__device__ __forceinline__ void copy_tile(const Params& p, const Part& part, const Span& span, u32 tile) {
  const u32 run = part.run_bytes / sizeof(Unit);
  const u32 units = run * part.heads * span.tokens;  // less than 2^31
  // Neighbours in the pages are neighbours among the threads.
  const bool heads_inner = part.head_stride < part.token_stride;
  const u32 inner = heads_inner ? part.heads : span.tokens;

  char* page = (char*)(part.address + span.block * part.block_stride + span.offset * part.token_stride);
  char* share = (char*)(p.staging + (part.share_offset - p.share_offset));

  Unit held[DEPTH];
  Unit* to[DEPTH];
  u32 count = 0;
#pragma unroll
  for (u32 k = 0; k < DEPTH; ++k) {
    const u32 unit = (tile * DEPTH + k) * blockDim.x + threadIdx.x;
    if (unit < units) {
      const u32 row = unit / run;
      const u64 byte = (unit - row * run) * sizeof(Unit);
      const u32 o = row / inner, i = row - o * inner;
      const u64 head = heads_inner ? i : o, token = heads_inner ? o : i;
      char* in_page = page + head * part.head_stride + token * part.token_stride + byte;
      char* in_share =
          share + (head * p.chunk_tokens + span.token + token) * part.row_bytes + part.row_offset + byte;
      held[k] = load_once((const Unit*)(SCATTER ? in_share : in_page));
      to[k] = (Unit*)(SCATTER ? in_page : in_share);
      count = k + 1;
    }
  }
#pragma unroll
  for (u32 k = 0; k < DEPTH; ++k)
    if (k < count) *to[k] = held[k];
}

template <bool SCATTER>
__device__ __forceinline__ void copy(const Params& p) {
  const u64 tiles = (u64)p.parts_count * p.spans_count * p.tiles;
  for (u64 at = blockIdx.x; at < tiles; at += gridDim.x) {
    const u64 pair = at / p.tiles;
    const u32 tile = (u32)(at - pair * p.tiles);
    const Part part = p.parts[pair / p.spans_count];
    const Span span = p.spans[pair % p.spans_count];
    // Checked before the launch; once more, because what is at stake is somebody else's memory.
    if (span.block >= p.blocks) continue;
    if (span.offset >= p.block_tokens || span.tokens > p.block_tokens - span.offset) continue;
    if (span.token >= p.chunk_tokens || span.tokens > p.chunk_tokens - span.token) continue;
    if (p.unit == 16)
      copy_tile<SCATTER, uint4>(p, part, span, tile);
    else if (p.unit == 4)
      copy_tile<SCATTER, u32>(p, part, span, tile);
    else
      copy_tile<SCATTER, u8>(p, part, span, tile);
  }
}

extern "C" __global__ void __launch_bounds__(256) kvgate_scatter(const __grid_constant__ Params p) { copy<true>(p); }
extern "C" __global__ void __launch_bounds__(256) kvgate_gather(const __grid_constant__ Params p) { copy<false>(p); }
