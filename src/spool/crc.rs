//! CRC-32C (Castagnoli), which finds every error of up to 32 bits in a row.

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            // The polynomial 0x1edc6f41, its bits reversed.
            crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

pub(super) fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(u32::MAX, |crc, byte| {
        (crc >> 8) ^ TABLE[(crc as u8 ^ byte) as usize]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_one_that_others_call_by_this_name() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b""), 0);
    }
}
