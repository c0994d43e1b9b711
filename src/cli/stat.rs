use super::error::CliError;
use super::output::Out;
use clap::Args;
/// TODO
#[derive(Debug, Args)]
pub struct StatArgs {}
pub async fn run(_: StatArgs, _: u8, _: &mut Out) -> Result<(), CliError> {
    Ok(())
}
