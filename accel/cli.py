import typer
from ..distill.cli import app as train
app = typer.Typer()
app.add_typer(train, name="train")
@app.command()
def nothing(): ...
def main(): app()
