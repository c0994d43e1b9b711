"""SGLang's own host pools and storage configuration, small, without an engine."""

import torch
from kvgate.sglang import KvGateStorage
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 64
PAGES = 32
LAYERS, HEADS, HEAD_DIM = 3, 4, 16
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def config(socket, rank=0, ranks=1, is_mla=False, **extra):
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=is_mla,
        enable_storage_metrics=True,
        is_page_first_layout=False,
        model_name="tiny",
        extra_config={"interface_v1": 1, "socket": str(socket), "model": "tiny", "revision": "1", **extra},
    )


def storage(socket, pools, **named):
    """A backend with these pools, the first one KV's."""
    backend = KvGateStorage(config(socket, **named))
    backend.register_mem_pool_host(pools[PoolName.KV])
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    return backend


def mha(
    layout,
    page=PAGE,
    pages=PAGES,
    layers=LAYERS,
    heads=HEADS,
    head_dim=HEAD_DIM,
    v_head_dim=None,
    dtype=torch.bfloat16,
    allocator="default",
    drafts=0,
):
    """`drafts`: layers of a draft in the same pages, as for MTP."""
    size = page * pages

    def device(layers):
        pool = MHATokenToKVPool(
            size=size,
            page_size=page,
            dtype=dtype,
            head_num=heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
        )
        return pool._mha_buffer_info()

    pool = AsymmetricMHATokenToKVPoolHost if v_head_dim else MHATokenToKVPoolHost
    return pool(
        device(layers),
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=size,
        start_layer=0,
        end_layer=layers,
        allocator_type=allocator,
        draft_buffer_infos=tuple(device(1) for _ in range(drafts)),
    )


def mla(layout, page=PAGE, pages=PAGES, layers=LAYERS, rank=32, rope=16, allocator="default", drafts=0):
    size = page * pages

    def device(layers):
        return MLATokenToKVPool(
            size=size,
            page_size=page,
            dtype=torch.bfloat16,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
        )

    return latents(device(layers), layout, allocator, [device(1) for _ in range(drafts)])


def dsa(layout, layers=LAYERS, drafts=0):
    """The pools of DeepSeek V3.2: latents, and the index of them."""
    size = PAGE * PAGES

    def device(layers):
        return DSATokenToKVPool(
            size=size,
            page_size=PAGE,
            kv_lora_rank=32,
            dtype=torch.bfloat16,
            qk_rope_head_dim=16,
            layer_num=layers,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=48,
            index_buf_size=size,
        )

    target, packed = device(layers), tuple(device(1) for _ in range(drafts))
    anchor, index = latents(target, layout, drafts=packed), make_dsa_indexer_pool_decl(target)
    return anchor, DSAIndexerPoolHost(index, anchor, packed_draft_device_pools=packed, pin_memory=False)


def latents(device, layout, allocator="default", drafts=()):
    size, page, layers = device.size, device.page_size, device.layer_num
    return MLATokenToKVPoolHost(
        device._mla_buffer_info(),
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=size,
        start_layer=0,
        end_layer=layers,
        target_layer_num=layers,
        allocator_type=allocator,
        draft_buffer_infos=tuple(draft._mla_buffer_info() for draft in drafts),
    )


def mamba(slots=PAGES, layers=2, temporal=(2, 3, 4), conv=(5, 2), drafts=0):
    def states(layers):
        def state(shape, dtype):
            return torch.zeros((layers, slots, *shape), dtype=dtype)

        return MambaStateBufferInfo(temporal=state(temporal, torch.float32), conv=[state(conv, torch.bfloat16)])

    return MambaPoolHost(
        states(layers),
        1.0,
        0,
        device_capacity=slots,
        pin_memory=False,
        device="cpu",
        layout="page_first",
        mtp_draft_buffer_infos=[states(1) for _ in range(drafts)],
    )


def bytes_of(pool, slot):
    """A page's bytes, as SGLang's own backends read them."""
    return pool.get_data_page(slot).contiguous().view(torch.uint8).flatten()


def buffers(pool):
    kept = pool.index_k_with_scale_buffer if isinstance(pool, DSAIndexerPoolHost) else pool.kv_buffer
    return list(kept) if isinstance(kept, list | tuple) else [kept]


def fill(pool, seed):
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        plain = buffer.view(torch.uint8)
        plain.copy_(torch.randint(0, 256, plain.shape, dtype=torch.uint8, generator=generator))


def wipe(pool):
    for buffer in buffers(pool):
        buffer.view(torch.uint8).fill_(0xAA)
