"""The DFlash draft on SGLang's layers: model, context KV, strict loader, and the head it borrows."""
