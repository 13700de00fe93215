//! Reading of cubins, which are 64-bit little-endian ELF files.

/// The value of an `int` symbol of the file, such as a `__constant__` that the kernel tells the host.
pub(super) fn constant(cubin: &[u8], name: &str) -> Option<i32> {
    let file = cubin.strip_prefix(b"\x7fELF\x02\x01").map(|_| Elf(cubin))?;
    let sections = || (0..file.number::<2>(60)? as usize).map(|i| file.section(i)).collect::<Option<Vec<_>>>();
    let sections = sections()?;
    // SHT_SYMTAB, with symbols of 24 bytes: name u32, info u8, other u8, section u16, value u64, size u64.
    let symbols = sections.iter().find(|section| section.kind == 2)?;
    let names = sections.get(symbols.link)?;
    for at in (symbols.offset..symbols.offset.checked_add(symbols.size)?).step_by(24) {
        let text = cubin.get(names.offset.checked_add(file.number::<4>(at)? as usize)?..)?;
        if text.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0)) {
            let section = sections.get(file.number::<2>(at + 6)? as usize)?;
            let (value, size) = (file.number::<8>(at + 8)? as usize, file.number::<8>(at + 16)?);
            return (size == 4).then(|| file.number::<4>(section.offset.checked_add(value)?)).flatten().map(|x| x as u32 as i32);
        }
    }
    None
}

struct Elf<'a>(&'a [u8]);

struct Section {
    kind: u64,
    offset: usize,
    size: usize,
    link: usize,
}

impl Elf<'_> {
    fn number<const N: usize>(&self, at: usize) -> Option<u64> {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(self.0.get(at..at.checked_add(N)?)?);
        Some(u64::from_le_bytes(bytes))
    }

    /// Of the table that the header names, with entries of 64 bytes.
    fn section(&self, index: usize) -> Option<Section> {
        let at = (self.number::<8>(40)? as usize).checked_add(64 * index)?;
        let word = |offset| self.number::<8>(at.checked_add(offset)?).map(|x| x as usize);
        let link = self.number::<4>(at.checked_add(40)?)? as usize;
        Some(Section { kind: self.number::<4>(at.checked_add(4)?)?, offset: word(24)?, size: word(32)?, link })
    }
}

#[cfg(test)]
mod tests {
    use super::constant;

    /// A file with one symbol, `VALUE` = -7, in the only section with content.
    fn file() -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(64 + 4 * 64 + 64, 0);
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(40, &64u64.to_le_bytes());
        put(60, &4u16.to_le_bytes());
        let content = 64 + 4 * 64;
        // Sections: none, symbols, names, data.
        for (i, kind, offset, size, link) in [(1, 2u32, content, 24u64, 2u32), (2, 3, content + 24, 7, 0), (3, 1, content + 32, 8, 0)] {
            let at = 64 + 64 * i;
            put(at + 4, &kind.to_le_bytes());
            put(at + 24, &(offset as u64).to_le_bytes());
            put(at + 32, &size.to_le_bytes());
            put(at + 40, &link.to_le_bytes());
        }
        put(content, &1u32.to_le_bytes());
        put(content + 6, &3u16.to_le_bytes());
        put(content + 8, &4u64.to_le_bytes());
        put(content + 16, &4u64.to_le_bytes());
        put(content + 25, b"VALUE");
        put(content + 36, &(-7i32).to_le_bytes());
        file
    }

    #[test]
    fn a_constant_is_found_and_damage_is_none() {
        let good = file();
        assert_eq!(constant(&good, "VALUE"), Some(-7));
        assert_eq!(constant(&good, "VALU"), None);
        assert_eq!(constant(&good, "OTHER"), None);
        for length in 0..good.len() - 24 {
            assert_eq!(constant(&good[..length], "VALUE"), None, "{length}");
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] = 0xff;
            constant(&bad, "VALUE");
        }
    }
}
