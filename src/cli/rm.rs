use super::error::CliError;
use super::output::Out;
use clap::Args;
/// TODO
#[derive(Debug, Args)]
pub struct RmArgs {}
pub async fn run(_: RmArgs, _: u8, _: &mut Out) -> Result<(), CliError> {
    Ok(())
}
