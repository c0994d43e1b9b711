//! Sessions with the node's gateway, and their calls. The caller's thread waits while the session's own do the work.

use std::ffi::c_char;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use kvgate::config;
use kvgate::engine::client::{Client, DaemonAddress};
use kvgate::engine::copy::{Copier, CpuCopier, CpuOptions};
use kvgate::engine::direct::Direct;
use tokio::runtime::{Builder, Runtime};

use crate::borrow::{CMemory, Prompt, borrowed, result, text};
use crate::space::Space;
use crate::status::{Failed, Status, call, tell};

/// Threads of a session that wait for the gateway; copies have threads of their own.
const THREADS: usize = 2;
/// The time for an answer, beyond the deadline of its call.
const PATIENCE: Duration = Duration::from_secs(10);

/// `kvgate_session`.
pub struct Session {
    direct: Direct,
    runtime: Runtime,
}

/// `kvgate_stored`.
#[repr(C)]
pub struct Stored {
    tokens: usize,
    new_chunks: usize,
    refused_chunks: usize,
}

impl Session {
    fn connect(socket: Option<&str>) -> Result<Self, Failed> {
        let loaded = config::load(None, config::process_env(), &[]).map_err(Failed::argument)?;
        let (api, copies) = (loaded.config.api, CpuOptions::from(&loaded.config.copy));
        let socket = socket.map_or(api.socket, Into::into);
        let client = Client::new(DaemonAddress::Unix(socket))
            .trusting(api.socket_owner)
            .with_patience(PATIENCE);
        let random = std::hash::RandomState::new().build_hasher().finish();
        let instance = format!("c-{}-{random:016x}", std::process::id());
        let direct = Direct::new(&client, instance, move |cache| {
            // SAFETY: a call's memory is the caller's, who vouches for it until the call returns; the copier goes with
            // the call.
            Ok(Copier::Cpu(unsafe { CpuCopier::new(cache, copies) }))
        });
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("kvgate")
            .enable_all()
            .build()
            .map_err(Failed::internal)?;
        runtime.block_on(direct.attach())?;
        Ok(Self { direct, runtime })
    }
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_connect(socket: *const c_char, session: *mut *mut Session) -> Status {
    call(|| {
        // SAFETY: as the caller says.
        let (socket, session) = unsafe { (text("socket", socket)?, result("session", session)?) };
        let connected = Session::connect(socket)?;
        session.write(Box::into_raw(Box::new(connected)));
        Ok(())
    })
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_disconnect(session: *mut Session) {
    if !session.is_null() {
        // SAFETY: it was made by `kvgate_connect`, and nothing uses it any more.
        let session = unsafe { Box::from_raw(session) };
        call(|| {
            drop(session);
            Ok(())
        });
    }
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_lookup(
    session: *const Session,
    space: *const Space,
    prompt: *const Prompt,
    deadline_ms: u64,
    pin_ms: u64,
    tokens: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller says.
        let (session, named) = unsafe { (borrowed("session", session)?, borrowed("space", space)?) };
        let space = &named.of;
        // SAFETY: as the caller says.
        let (chain, tokens) = unsafe {
            (
                borrowed("prompt", prompt)?.chain(space, named.secret.as_ref())?,
                result("tokens", tokens)?,
            )
        };
        let (deadline, pin) = (Duration::from_millis(deadline_ms), Duration::from_millis(pin_ms));
        let look = session.direct.lookup(space, &chain.hashes, deadline, pin, false);
        let found = session.runtime.block_on(look)?;
        tokens.write(found.boundary * space.chunk_tokens() as usize);
        Ok(())
    })
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_load(
    session: *const Session,
    space: *const Space,
    prompt: *const Prompt,
    tokens: usize,
    memory: *const CMemory,
    deadline_ms: u64,
    loaded: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller says.
        let (session, named) = unsafe { (borrowed("session", session)?, borrowed("space", space)?) };
        let space = &named.of;
        // SAFETY: as the caller says.
        let (chain, loaded) = unsafe {
            (
                borrowed("prompt", prompt)?.chain(space, named.secret.as_ref())?,
                result("loaded", loaded)?,
            )
        };
        // SAFETY: as the caller says.
        let memory = unsafe { borrowed("memory", memory)?.of(space)? };
        let of_chunk = space.chunk_tokens() as usize;
        let wanted = chain.hashes.get(..tokens / of_chunk).ok_or_else(|| {
            let full = chain.hashes.len() * of_chunk;
            Failed::argument(format!(
                "{tokens} tokens are to be loaded, and the prompt's full chunks have {full}"
            ))
        })?;
        let deadline = Duration::from_millis(deadline_ms);
        let load = session
            .direct
            .load(space, wanted, &memory, deadline, std::future::pending());
        let outcome = session.runtime.block_on(load)?;
        tell(&outcome.reason.unwrap_or_default());
        loaded.write(outcome.chunks * of_chunk);
        Ok(())
    })
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_store(
    session: *const Session,
    space: *const Space,
    prompt: *const Prompt,
    memory: *const CMemory,
    deadline_ms: u64,
    stored: *mut Stored,
) -> Status {
    call(|| {
        // SAFETY: as the caller says.
        let (session, named) = unsafe { (borrowed("session", session)?, borrowed("space", space)?) };
        let space = &named.of;
        // SAFETY: as the caller says.
        let (chain, stored) = unsafe {
            (
                borrowed("prompt", prompt)?.chain(space, named.secret.as_ref())?,
                result("stored", stored)?,
            )
        };
        // SAFETY: as the caller says.
        let memory = unsafe { borrowed("memory", memory)?.of(space)? };
        let (parents, deadline) = (chain.parents(), Duration::from_millis(deadline_ms));
        let store = session.direct.store(
            space,
            &chain.hashes,
            &parents,
            &memory,
            deadline,
            std::future::pending(),
        );
        let outcome = session.runtime.block_on(store)?;
        tell(&outcome.reason.unwrap_or_default());
        stored.write(Stored {
            tokens: outcome.chunks * space.chunk_tokens() as usize,
            new_chunks: outcome.new,
            refused_chunks: outcome.refused,
        });
        Ok(())
    })
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_flush(session: *const Session, deadline_ms: u64) -> Status {
    call(|| {
        // SAFETY: as the caller says.
        let session = unsafe { borrowed("session", session)? };
        let flush = session.direct.flush(Duration::from_millis(deadline_ms));
        session.runtime.block_on(flush)?;
        Ok(())
    })
}
