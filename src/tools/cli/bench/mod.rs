//! `kvgate bench`: the flags become settings, `tools/bench` measures, and the report is told as table, JSON or CSV.
//!
//! The first Ctrl-C ends the phase under way, and what the bench wrote is removed. The second Ctrl-C does not wait.

mod args;
mod csv;
mod endpoints;
mod live;
mod table;

use tokio::time::Instant;

use super::error::CliError;
use super::interrupts::interrupts;
use super::logging;
use super::output::{self, Out};
use crate::cache::gateway::{GatewayOptions, OpenError};
use crate::config::Config;
use crate::config::units::ByteSize;
use crate::tools::bench::{
    Bench, BenchError, BenchPhase, BenchPrompt, BenchReport, BenchSettings, Interrupts, PhaseReport,
};
use crate::tools::s3_server::{S3Server, S3ServerError};
pub use args::BenchArgs;
use csv::Csv;
use live::LiveLine;

pub async fn run(args: BenchArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let mut config = args.connect.load(Vec::new())?.config;
    if let Some(size) = args.part_size {
        (config.s3.part_size, config.load.layer_part_size) = (size, size);
    }
    logging::init(&config.log, verbose);
    let name = args.name();
    let prompt = args.prompt(&name)?;
    let settings = args.settings(&config, name, prompt.as_ref())?;
    make_room(&mut config, &settings);
    // Opened first, so that nothing is measured that could not be reported.
    let csv = args.output.csv.as_deref().map(Csv::open).transpose()?;
    let mut interrupts = interrupts()?;
    let host = S3Server::start(&config, "kvgate-bench", false).await?;
    let bench = tokio::select! {
        bench = args.bench(&host, config, settings, prompt, interrupts.clone()) => bench,
        _ = interrupts.changed() => Err(CliError::Failed("interrupted".into())),
    };
    let result = match bench {
        Ok(bench) => args.run_on(&host, bench, csv, out).await,
        Err(error) => Err(error),
    };
    host.stop().await;
    result
}

/// Makes room for all requests in flight, on one endpoint too: the configuration may have fewer connections, and
/// windows for fewer bytes.
fn make_room(config: &mut Config, settings: &BenchSettings) {
    let largest = settings.object_bytes.max(settings.part_bytes);
    let window = ByteSize(largest.saturating_mul(settings.concurrency as u64));
    let (s3, endpoints) = (&mut config.s3, &mut config.endpoints);
    s3.connections = s3
        .connections
        .max(u32::try_from(settings.concurrency).unwrap_or(u32::MAX));
    endpoints.window = endpoints.window.max(window);
    endpoints.window_max = endpoints.window_max.max(window);
}

impl BenchArgs {
    /// A bench on a server that has the bucket, and room.
    async fn bench(
        &self,
        host: &S3Server,
        config: Config,
        mut settings: BenchSettings,
        mut prompt: Option<BenchPrompt>,
        interrupts: Interrupts,
    ) -> Result<Bench, CliError> {
        settings.endpoint.clone_from(&host.endpoint);
        settings.bucket.clone_from(&host.bucket);
        let soon = Instant::now() + 2 * config.s3.request_timeout;
        match host.is_embedded() {
            true => host.store.create_bucket(soon).await?,
            false => host.store.check_bucket(soon).await?,
        }
        let bytes = settings.objects.saturating_mul(settings.object_bytes);
        if let Some((folder, free)) = host.room()
            && self.phases().contains(&BenchPhase::Write)
            && bytes > free
        {
            return Err(CliError::usage(format!(
                "the objects take {}, and {} has room for {}: lower --objects or --object-size, or set TMPDIR to another \
                 folder",
                output::bytes(bytes),
                folder.display(),
                output::bytes(free)
            )));
        }
        if let Some(prompt) = &mut prompt {
            let options = GatewayOptions::with_keys(&config).await;
            prompt.keyring = options.map_err(OpenError::from)?.keyring;
        }
        let bench = Bench::new(host.store.clone(), config, settings, prompt, interrupts)?;
        bench.check(&self.phases())?;
        Ok(bench)
    }

    async fn run_on(
        &self,
        host: &S3Server,
        bench: Bench,
        mut csv: Option<Csv>,
        out: &mut Out,
    ) -> Result<(), CliError> {
        let table = !self.output.json && !csv.as_ref().is_some_and(Csv::is_stdout);
        let mut report = BenchReport {
            version: env!("CARGO_PKG_VERSION"),
            settings: bench.settings().clone(),
            phases: Vec::new(),
            interrupted: false,
        };
        if table {
            table::header(&report.settings, &host.place, out)?;
        }
        let outcome = self
            .run_phases(bench, &mut report, |phase, settings| {
                if table {
                    table::row(phase, out)?;
                }
                match &mut csv {
                    Some(csv) => csv.add(settings, phase, out),
                    None => Ok(()),
                }
            })
            .await;
        if self.output.json {
            out.json(&report)?;
        }
        outcome.and_then(|()| verdict(&report))
    }

    /// Runs the phases; the report also has the ones before a failure.
    async fn run_phases(
        &self,
        mut bench: Bench,
        report: &mut BenchReport,
        mut tell: impl FnMut(&PhaseReport, &BenchSettings) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        let live = LiveLine::start(bench.under_way());
        let mut outcome = Ok(());
        let mut wrote = false;
        // True if objects that this run wrote and should remove are left.
        let mut left = false;
        for phase in self.phases() {
            // After a failure or an interruption, only objects that this run wrote are removed, if they were to be.
            if outcome.is_err() || report.interrupted {
                if !(wrote && phase == BenchPhase::Delete) {
                    continue;
                }
                bench.forget_interrupts();
            }
            wrote |= phase == BenchPhase::Write;
            let result = bench.run(phase).await;
            if phase == BenchPhase::Delete {
                left = wrote && !matches!(&result, Ok(done) if done.ops == done.objects);
            }
            match result {
                Ok(done) => {
                    report.interrupted |= done.interrupted;
                    let told = live.pause(|| tell(&done, &report.settings));
                    let fatal = done.fatal.as_deref().map_or(Ok(()), |error| Err(error.into()));
                    report.phases.push(done);
                    outcome = outcome.and(fatal).and(told);
                }
                Err(BenchError::Interrupted) => report.interrupted = true,
                Err(error) => outcome = outcome.and(Err(error.into())),
            }
        }
        if left && !report.settings.embedded {
            let BenchSettings {
                name,
                objects,
                prompt,
                ..
            } = &report.settings;
            let shape = match prompt {
                Some(prompt) => format!("--tokens {} and the same --model or --space", prompt.tokens),
                None => format!("--objects {objects}"),
            };
            tracing::warn!(
                "objects may be left; this removes them: kvgate bench delete --name {name} {shape}, with the same \
                 --endpoint, --bucket and --prefix"
            );
        }
        outcome
    }
}

/// Fails if a request did, or if the bench was ended early.
fn verdict(report: &BenchReport) -> Result<(), CliError> {
    let failed = |phase: &PhaseReport| {
        let (count, first) = (phase.errors.count, phase.errors.first.as_ref()?);
        let tried = phase.ops + count;
        let end = match phase.errors.gave_up {
            true => "; the phase ended with so many",
            false => "",
        };
        Some(format!(
            "{}: {count} of {tried} requests failed{end}, the first: {first}",
            phase.phase.name()
        ))
    };
    let mut failures: Vec<String> = report.phases.iter().filter_map(failed).collect();
    if report.interrupted {
        failures.push("interrupted".into());
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(CliError::Failed(failures.join("\n"))),
    }
}

impl From<BenchError> for CliError {
    fn from(error: BenchError) -> Self {
        match error {
            BenchError::Object(error) => error.into(),
            _ => Self::Usage(error.to_string()),
        }
    }
}

impl From<S3ServerError> for CliError {
    fn from(error: S3ServerError) -> Self {
        match error.is_usage() {
            true => Self::Usage(error.to_string()),
            false => Self::Failed(error.to_string()),
        }
    }
}
